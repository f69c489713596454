"""What this machine can measure, and what would spoil its measurements."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (before the other files, which an older Python cannot read)
    found = f"{sys.version_info[0]}.{sys.version_info[1]}"
    sys.exit(f"ddpperf needs Python 3.11 or newer, this is Python {found}; use a newer one")
