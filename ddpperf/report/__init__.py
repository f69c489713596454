"""Conversion of a stored run to text, Markdown, HTML, pictures, CSV and Prometheus files."""
