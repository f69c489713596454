"""What a user's function changes in the whole process reaches only measurements of this function."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import module as modules

from ddpperf import specs
from ddpperf.specs import FUNCTIONS_VARIABLE, CopySpec, CustomStepSpec
from ddpperf.training.process_settings import process_settings, restore
from ddpperf.workers.rank_commands import Rank
from tests.unit.test_step import training_step

OWN = CustomStepSpec(function="changes_settings:make", world_size=1, per_rank_batch_size=4)
CHANGES = """
import gc, logging, os, sys, torch, warnings
from torch.nn.modules import module as modules

def nothing(*_):
    pass

torch.set_default_dtype(torch.float64)  # once, when the module is imported

def make(rank, world_size, batch_size, device):
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_flush_denormal(True)
    torch.set_num_threads(2)
    torch.set_default_device("meta")
    torch.backends.cudnn.benchmark = True
    torch.autograd.set_detect_anomaly(True)
    torch.backends.mkldnn.set_flags(False)
    torch.backends.cuda.enable_flash_sdp(False)
    warnings.simplefilter("error")
    if "elsewhere" not in sys.path:
        sys.path.insert(0, "elsewhere")
    sys.setprofile(nothing)
    sys.setswitchinterval(1.0)
    logging.root.setLevel(1)
    torch.autograd.set_multithreading_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    if not modules._global_forward_hooks:
        modules.register_module_forward_hook(nothing)
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    os.chdir("/")
    gc.set_threshold(1)
    gc.disable()
    torch.set_float32_matmul_precision("high")
    os.environ["NCCL_ALGO"] = "Ring"
    return lambda: torch.zeros((), device="cpu")
"""


MADE = """
    batch = lambda size: (torch.ones(size, 2), torch.zeros(size, dtype=torch.long))
    return torch.nn.Linear(2, 2), batch, torch.nn.functional.cross_entropy
"""


@pytest.fixture(autouse=True)
def _same_settings() -> Iterator[None]:
    before = process_settings()
    # Whatever other tests have left
    torch.set_flush_denormal(False)
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = False
    gc.enable()
    yield
    restore(before)


def found() -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device().type,
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "denormal": torch.full((), 1e-310, dtype=torch.float64, device="cpu").mul(1).item() > 0,
        "threads": torch.get_num_threads(),
        "benchmark": torch.backends.cudnn.benchmark,
        "anomaly": torch.is_anomaly_enabled(),
        "collects": gc.isenabled(),
        "products": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        "products on GPUs": torch.backends.cuda.matmul.fp32_precision,
        "threshold": gc.get_threshold(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "warnings": list(warnings.filters),
        "path": list(sys.path),
        "profile": sys.getprofile(),
        "switch": sys.getswitchinterval(),
        "level": logging.root.level,
        "autograd": torch.autograd.is_multithreading_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "hooks": len(modules._global_forward_hooks),
        "folder": os.getcwd(),
        "cores": len(os.sched_getaffinity(0)),
        "variable": os.environ.get("NCCL_ALGO"),
    }


def test_changes_reach_only_the_function_that_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "changes_settings.py").write_text(CHANGES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(FUNCTIONS_VARIABLE, OWN.function)
    rank = Rank(0)
    rank.setup("cpu", None)
    usual = found()
    rank.open(specs.to_json(OWN))
    changed = found()
    assert [name for name in usual if changed[name] == usual[name]] == []
    rank.close()
    assert found() == usual
    rank.open(specs.to_json(OWN))
    assert found() == changed, "as in its first measurement, although its module is not imported again"
    rank.open(specs.to_json(CopySpec(world_size=1, nbytes=1024)))
    assert found() == usual


def test_model_does_not_change_the_precision_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a step in fp32 would be one in TF32."""
    model = "import torch\n\ndef make():\n    torch.set_float32_matmul_precision('high')\n" + MADE
    (tmp_path / "with_tf32.py").write_text(model)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(FUNCTIONS_VARIABLE, "with_tf32:make")
    training_step(model="with_tf32:make", precision="fp32")
    assert found()["products"] == found()["products on GPUs"] == "ieee"
    assert torch.get_float32_matmul_precision() == "highest", "torch refuses to compile what contradicts it"
