"""Was it slower, and how sure are we: from measurements to PASS, FAIL or NO VERDICT."""
