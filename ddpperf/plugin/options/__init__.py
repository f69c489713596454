"""The options of the suite: declared, read and checked."""
