"""How times changed over the stored runs, and since which commit or version a test is slower."""
