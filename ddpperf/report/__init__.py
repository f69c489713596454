"""A stored run becomes text, Markdown and pictures."""
