"""What leaves and enters a process: text for terminals, files, temporary folders, secrets, commands."""
