"""Save the state of a training to a checkpoint file, and restore the state from the file.

A checkpoint file is written whole or not at all. The file has the output of torch.save,
and then a line with the SHA-256 of this output. Loading a file does not execute code from it.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpperf.errors import CannotTrain, first_line, quoted, short
from ddpperf.regular_files import open_regular
from ddpperf.temporary import temporary_file

VERSION = 4
LABEL = b"\nddpperf sha256 "  # begins the last line
HEX_DIGITS = 64
CHUNK_BYTES = 2**20
PATH_LETTERS = 80  # a rank's sentence is cut, and must not lose what follows the path


def save(path: Path, spec: dict[str, Any], state: dict[str, Any]) -> None:
    """Write a training's spec and state to a checkpoint file, which replaces any older file.

    Raises CannotTrain if the file cannot be written.
    """
    stored = {"version": VERSION, "torch": str(torch.__version__), "spec": spec, "state": state}
    try:
        with temporary_file(path) as temporary:
            with temporary.open("w+b") as file:
                torch.save(stored, file)
                file.seek(0)
                file.write(LABEL + hashlib.file_digest(file, "sha256").hexdigest().encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error  # torch raises a RuntimeError after the OSError of a full disk
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        advice = "free space there, or change --checkpoints"
        raise CannotTrain(
            f"the checkpoint {_named(path)} cannot be written ({cause.strerror}); {advice}"
        ) from error


def load(path: Path, spec: dict[str, Any], device: torch.device) -> dict[str, Any] | None:
    """Return the training state in a checkpoint file, or None if the file does not exist.

    Raises CannotTrain for a file whose checksum is wrong or missing, and for a file of another
    training or another version of torch.
    """
    try:
        with open_regular(path) as file:
            if problem := _checksum_problem(file):
                raise CannotTrain(f"the checkpoint {_named(path)} {problem}; remove it to start again")
            file.seek(0)
            stored = torch.load(file, weights_only=True, map_location=device)
    except FileNotFoundError:
        return None
    except (CannotTrain, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # torch raises most kinds for a file that something else has written
        # torch advises to load a file that holds code by executing the code.
        found = "it holds more than tensors, numbers and texts"
        why = found if isinstance(error, pickle.UnpicklingError) else short(first_line(error), 50)
        if isinstance(error, OSError) and error.strerror:
            why = error.strerror  # without the path, which the sentence names already
        raise CannotTrain(
            f"the checkpoint {_named(path)} cannot be read ({why}); remove it to start again"
        ) from error
    if not isinstance(stored, dict) or stored.get("version") != VERSION:
        why = "was not written by this version of ddpperf"
        raise CannotTrain(f"the checkpoint {_named(path)} {why}; remove it to start again")
    kinds = {"torch": str, "spec": dict, "state": dict}
    if wrong := [name for name, kind in kinds.items() if not isinstance(stored.get(name), kind)]:
        raise CannotTrain(f"the checkpoint {_named(path)} holds no {wrong[0]}; remove it to start again")
    advice = "remove it, or name another folder"
    if stored["torch"] != torch.__version__:
        why = f"by torch {stored['torch'][:20]}, but this is {torch.__version__}, which may train differently"
        raise CannotTrain(f"the checkpoint {_named(path)} was written {why}; {advice}")
    theirs = stored["spec"]
    for name in sorted({*theirs, *spec}, key=str):
        if theirs.get(name) != spec.get(name):
            why = f"{str(name)[:20]} {quoted(theirs.get(name))}, not {quoted(spec.get(name))}"
            raise CannotTrain(f"the checkpoint {_named(path)} is of another training: {why}; {advice}")
    state: dict[str, Any] = stored["state"]
    return state


def _named(path: Path) -> str:
    """Return a path without its middle if it is long."""
    text, half = str(path), PATH_LETTERS // 2
    return text if len(text) <= PATH_LETTERS else f"{text[: half - 3]}...{text[-half:]}"


def _checksum_problem(file: BufferedReader) -> str:
    """Return what is wrong with the checksum at the end of a checkpoint file, or ""."""
    length = max(0, file.seek(0, os.SEEK_END) - len(LABEL) - HEX_DIGITS)
    file.seek(length)
    label, stored = file.read(len(LABEL)), file.read().decode(errors="replace")
    if label != LABEL:
        return "has no checksum: it is cut short, or an older ddpperf wrote it"
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(min(length, CHUNK_BYTES)):
        digest.update(chunk)
        length -= len(chunk)
    return "" if digest.hexdigest() == stored else "is damaged: its content does not fit its SHA-256"


def require_equal_epochs(path: Path, epochs: int, device: torch.device) -> None:
    """Raise CannotTrain unless all ranks found a checkpoint with equally many epochs, or none.

    On several nodes the ranks can see different folders of one name. epochs: the number on this
    rank, 0 without a checkpoint.
    """
    ends = torch.tensor([epochs, -epochs], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    most, least = int(ends[0]), -int(ends[1])
    if most != least:
        found = f"has {most} epochs on some ranks and {least} on others"
        advice = "let --checkpoints name a folder that all nodes share, or copy it to each node"
        raise CannotTrain(f"the checkpoint {_named(path)} {found}; {advice}")


def restore(path: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Copy the training state of a checkpoint into an existing model and its optimizer.

    The tensors keep their addresses, because a CUDA graph uses these addresses. Before that, the
    optimizer must have stepped, except in fp16, whose scaler may have skipped all warm-up steps of an
    eager training. Raises CannotTrain if the state has other parameters than the model, for
    example after a change of the model's code.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        model.load_state_dict(state["model"])
        for number, kept in state["optimizer"].items():
            own = optimizer.state[parameters[number]]
            never_stepped = not own
            for name, value in kept.items():
                if isinstance(value, Tensor):
                    place = own.setdefault(name, torch.empty_like(value)) if never_stepped else own[name]
                    if place.shape != value.shape:
                        raise ValueError(f"{name} of {tuple(value.shape)}, not {tuple(place.shape)}")
                    place.copy_(value)
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # not the checkpoint's fault
        raise
    except (RuntimeError, KeyError, IndexError, ValueError) as error:
        why = f"has other parameters than the model ({first_line(error)}); remove it, or name another"
        raise CannotTrain(f"the checkpoint {_named(path)} {why}") from error
