"""Loaded by each Python process of a measured script: it loads the marks, and the user's own sitecustomize.

This folder comes first on the script's path.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location

_here = os.path.dirname(os.path.realpath(__file__))
_others = [folder for folder in sys.path if os.path.realpath(folder) != _here]
for _name, _spec in (
    ("ddpperf_script_marks", spec_from_file_location("marks", f"{_here}/../script_marks.py")),
    ("sitecustomize", PathFinder.find_spec("sitecustomize", _others)),
):
    if _spec is not None and _spec.loader is not None:
        sys.modules[_name] = _module = module_from_spec(_spec)
        _spec.loader.exec_module(_module)
