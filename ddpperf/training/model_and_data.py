"""Build the model, one rank's input data and the loss function for a training spec."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ddpperf.data.images import EpochBatches, Images, load_images
from ddpperf.data.inputs import DeviceImages, DeviceInput, FixedInput, Input, LoaderInput, normalized
from ddpperf.errors import CannotTrain
from ddpperf.specs import DATA_VARIABLE, RunSpec, TrainingSpec, is_custom_model
from ddpperf.training.models import Loss, build, custom_batch, custom_model

MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model on its device, one rank's input data, and the model's loss function."""

    module: nn.Module
    input: Input
    loss: Loss


def make_task(spec: TrainingSpec, rank: int, device: torch.device) -> Task:
    """Build the model, the input data and the loss function of a training spec.

    The model is a custom model or a classifier of images.
    """
    torch.manual_seed(spec.seed)
    if is_custom_model(spec.model):
        module, make_batch, loss = custom_model(spec.model)
        torch.manual_seed(1 + rank)
        inputs, targets = custom_batch(spec.model, make_batch, spec.process_batch_size)
        fixed = FixedInput((inputs.to(device), targets.to(device)))
        return Task(module=module.to(device), input=fixed, loss=loss)
    memory_format = MEMORY_FORMATS[spec.memory_format]
    model = build(spec.model).to(device, memory_format=memory_format)  # type: ignore[call-overload]
    load = partial(load_images, data_path(spec), spec.epoch_images, coarse=isinstance(spec, RunSpec))
    images = load()
    require_classifier(spec.model, model, images, device)
    torch.manual_seed(1 + rank)  # from here on each rank draws its own numbers, such as a loader's crops
    batches = epoch_batches(spec, rank)
    source: Input
    if spec.input == "dataloader":
        source = LoaderInput(load, batches, spec.loader_workers, device, memory_format)
    elif spec.input == "device":
        augmentation = augmentation_of(spec) if isinstance(spec, RunSpec) else {}
        source = DeviceInput(DeviceImages(images, device, memory_format, **augmentation), batches)
    else:
        indices = next(iter(batches))
        pixels = normalized(images.pixels[indices].to(device), memory_format)
        source = FixedInput((pixels, images.labels[indices].to(device)))
    return Task(module=model, input=source, loss=F.cross_entropy)


def augmentation_of(spec: RunSpec) -> dict[str, Any]:
    """Return how a training recipe changes its training images, as arguments of DeviceImages."""
    uncropped_from = spec.epochs - spec.uncropped_epochs if spec.uncropped_epochs else None
    return {"padding": spec.crop_padding, "uncropped_from": uncropped_from, "cutmix": spec.cutmix}


def data_path(spec: TrainingSpec) -> str | None:
    """Return the path of a training spec's data set, or None if its images are synthetic."""
    return os.environ[DATA_VARIABLE] if spec.data != "synthetic" else None


def epoch_batches(spec: TrainingSpec, rank: int) -> EpochBatches:
    seed = spec.seed << 10  # the sampler adds the epoch's number to the seed
    return EpochBatches(spec.shard, rank if spec.grouped else 0, seed=seed, set_epoch=spec.set_epoch)


def require_classifier(name: str, model: nn.Module, images: Images, device: torch.device) -> None:
    """Raise CannotTrain if a model has fewer outputs than the images have classes.

    On a GPU a label beyond the outputs would end the process.
    """
    classes = int(images.labels.max()) + 1
    model.eval()
    with torch.no_grad():
        outputs = model(normalized(images.pixels[:2].to(device), torch.contiguous_format))
    model.train()
    if outputs.shape[-1] < classes:
        found = f"{outputs.shape[-1]} outputs, the data set {classes} classes"
        raise CannotTrain(f"model {name} has {found}; name another model")
