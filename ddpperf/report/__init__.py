"""Conversion of a stored run to text, Markdown and pictures."""
