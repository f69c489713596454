"""Conversion of a stored run to text, Markdown, HTML, pictures and CSV files."""
