"""The verdict on performance measurements: PASS, FAIL or NO VERDICT, with the reasons."""
