"""Conversion of a stored run to text and Markdown."""
