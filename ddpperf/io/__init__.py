"""Input and output: text for terminals, files, temporary folders, secrets, commands."""
