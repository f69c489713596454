"""Build the model, one rank's input data and the loss function for a training spec."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parameter import is_lazy

from ddpperf.data.augmentation import DeviceImages
from ddpperf.data.images import MEMORY_FORMATS, Images, load_images, normalized
from ddpperf.data.inputs import DeviceInput, Input, LoaderInput
from ddpperf.data.sampler import EpochBatches
from ddpperf.errors import CannotTrain
from ddpperf.specs import TrainingSpec, is_custom_model
from ddpperf.training.models import Loss, build, custom_batch, custom_model


def model_and_data(spec: TrainingSpec, rank: int, device: torch.device) -> tuple[nn.Module, Input, Loss]:
    """Return a spec's model on its device, one rank's input data, and the model's loss function.

    The model is a custom model or a classifier of images.
    """
    torch.manual_seed(spec.seed)
    if is_custom_model(spec.model):
        module, make_batch, loss = custom_model(spec.model)
        torch.manual_seed(1 + rank)
        inputs, targets = custom_batch(spec.model, make_batch, spec.process_batch_size)
        module, inputs = module.to(device), inputs.to(device)
        if any(map(is_lazy, module.parameters())):  # no strategy can wrap it before its first batch
            torch.manual_seed(spec.seed)
            with torch.no_grad():
                module(inputs)
            torch.manual_seed(1 + rank)
        return module, Input((inputs, targets.to(device))), loss
    memory_format = MEMORY_FORMATS[spec.memory_format]
    model = build(spec.model).to(device, memory_format=memory_format)  # type: ignore[call-overload]
    images = load_images(spec)
    require_classifier(spec.model, model, images, device)
    torch.manual_seed(1 + rank)  # from here on each rank draws its own numbers, such as a loader's crops
    batches = EpochBatches(spec, rank)
    source: Input
    if spec.input == "dataloader":
        source = LoaderInput(spec, batches, device)
    elif spec.input == "device":
        source = DeviceInput(DeviceImages(images, spec, device), batches)
    else:
        indices = next(iter(batches))
        pixels = normalized(images.pixels[indices].to(device), memory_format)
        source = Input((pixels, images.labels[indices].to(device)))
    return model, source, F.cross_entropy


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
