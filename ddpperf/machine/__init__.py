"""The measured machine: its hardware, its cores and compilers, and what disturbs measurements."""
