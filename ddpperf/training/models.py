"""Build a model by its name: ddpperf's own ResNets, torchvision's models, and custom models.

A candidate build of torch often lacks torchvision. The state dicts of the ResNets are
interchangeable with those of torchvision's models of the same name. The CIFAR models have a 3x3
stem of stride 1 and no max-pool, for images of 32x32 (He et al. 2016, section 4.2, with the widths
of the ImageNet models).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpperf.errors import CannotTrain
from ddpperf.specs.custom import import_function

Loss = Callable[[Any, Tensor], Tensor]  # from outputs and targets to a scalar
MakeBatch = Callable[[int], tuple[Tensor, Tensor]]  # from a batch size to inputs and targets
PATCH = 32  # values of an image's patch of 3 x 3 x 3, with zeros
EXPANSION = 4  # output channels of a bottleneck for each of its inner channels


class Block(nn.Module):
    """Residual block of a ResNet, with the names of torchvision's BasicBlock and Bottleneck.

    A basic block has two 3x3 convolutions. A bottleneck has convolutions of 1x1, 3x3 and 1x1, of
    which the 3x3 convolution has the stride.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        out_channels = channels * (EXPANSION if bottleneck else 1)
        first = (1, 1) if bottleneck else (3, stride)
        self.conv1 = _convolution(in_channels, channels, *first)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _convolution(channels, channels, 3, stride if bottleneck else 1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = _convolution(channels, out_channels, 1) if bottleneck else None
        self.bn3 = nn.BatchNorm2d(out_channels) if bottleneck else None
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            shortcut = _convolution(in_channels, out_channels, 1, stride)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        if self.conv3 is not None and self.bn3 is not None:
            x = self.bn3(self.conv3(self.relu(x)))
        return F.relu(x + shortcut, inplace=True)


def _convolution(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False)


class Stem(nn.Conv2d):
    """3x3 convolution of stride 1 for images of 3 channels, the first layer of a CIFAR model.

    On a GPU, a compiled step computes it as a matrix product. cuDNN's kernels for 3 channels hardly
    use the tensor cores, and the product makes a step of 512 images 3.7% shorter (one H200).
    """

    def __init__(self, out_channels: int) -> None:
        super().__init__(3, out_channels, 3, padding=1, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and input.is_cuda:
            return self.by_matrix_product(input)
        return super().forward(input)

    def by_matrix_product(self, images: Tensor) -> Tensor:
        """Return the convolution of images [N, 3, H, W] as patches [N H W, 32] times weights [32, C].

        Each patch has 27 values and 5 zeros, because the tensor cores need a multiple of 8.
        """
        height, width = images.shape[2:]
        padded = F.pad(images, (1, 1, 1, 1))
        shifted = [padded[:, :, y : y + height, x : x + width] for y in range(3) for x in range(3)]
        zeros = images.new_zeros(()).expand(len(images), PATCH - 27, height, width)
        patches = torch.cat([*shifted, zeros], 1).permute(0, 2, 3, 1).reshape(-1, PATCH)
        weights = self.weight.permute(0, 2, 3, 1).flatten(1)  # in the patches' order: y, x, channel
        product = patches @ F.pad(weights, (0, PATCH - 27)).T
        return product.view(-1, height, width, self.out_channels).permute(0, 3, 1, 2)


class ResNet(nn.Module):
    """ResNet that maps images of shape [N, 3, H, W] to logits of shape [N, num_classes].

    depths: blocks of each stage. width: channels of the first stage. Each later stage has twice as
    many channels. bottleneck: whether the blocks are bottlenecks.
    """

    def __init__(
        self,
        depths: tuple[int, int, int, int],
        *,
        num_classes: int = 10,
        cifar_stem: bool = True,
        bottleneck: bool = False,
        width: int = 64,
    ) -> None:
        super().__init__()
        self.conv1 = Stem(width) if cifar_stem else _convolution(3, width, 7, 2)
        self.maxpool = nn.Identity() if cifar_stem else nn.MaxPool2d(3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        channels = width
        stages = []
        for number, depth in enumerate(depths):
            stage = nn.Sequential()
            for place in range(depth):
                stride = 2 if number and not place else 1
                stage.append(Block(channels, width * 2**number, stride, bottleneck=bottleneck))
                channels = width * 2**number * (EXPANSION if bottleneck else 1)
            stages.append(stage)
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: ResNet((2, 2, 2, 2), num_classes=1000, cifar_stem=False),
    "resnet18_cifar": lambda: ResNet((2, 2, 2, 2)),
    # needs a sixtieth of resnet18_cifar's FLOPs, so that a CPU can train it
    "resnet10_cifar": lambda: ResNet((1, 1, 1, 1), width=8),
    "resnet50": lambda: ResNet((3, 4, 6, 3), num_classes=1000, cifar_stem=False, bottleneck=True),
    "resnet50_cifar": lambda: ResNet((3, 4, 6, 3), bottleneck=True),
}


def build(model: str) -> nn.Module:
    """Return a new model by its name, either a built-in model or `torchvision:NAME`.

    torchvision's models have random weights and one output. Its vit_ models are for images of 32x32.
    Raises CannotTrain for an unknown name.
    """
    if model in MODELS:
        return MODELS[model]()
    name = model.removeprefix("torchvision:")
    try:
        import torchvision.models
    except ImportError as error:
        raise CannotTrain(f"model {model} needs torchvision, which is not installed; install it") from error
    if name not in torchvision.models.list_models(module=torchvision.models):
        raise CannotTrain(f"model {model} is not in torchvision; name one of its models")
    settings: dict[str, Any] = {"image_size": 32} if name.startswith("vit_") else {}
    if name in ("googlenet", "inception_v3"):  # otherwise they return several outputs in training
        settings = {"aux_logits": False, "init_weights": True}
    built: nn.Module = torchvision.models.get_model(name, weights=None, **settings)
    return built


def custom_model(name: str) -> tuple[nn.Module, MakeBatch, Loss]:
    """Import and call a custom model's function, and return its module, batch maker and loss.

    name: `package.module:function`. Raises CannotTrain if the name was not given when this process
    started, if the function cannot be imported, or if the function does not return (module, batch
    maker, loss).
    """
    made = import_function(name, "model")()
    is_three = isinstance(made, tuple) and len(made) == 3
    if not (is_three and isinstance(made[0], nn.Module) and all(map(callable, made[1:]))):
        why = f"must return (module, batch maker, loss), got {_describe(made)}; return the three"
        raise CannotTrain(f"model {name} {why}")
    # The attributes of torch.compile(module), and of a module after module.compile()
    if any(getattr(made[0], name, None) is not None for name in ("_orig_mod", "_compiled_call_impl")):
        what = f"model {name} is compiled, so that eager steps would be compiled, too"
        raise CannotTrain(f"{what}; return it without torch.compile, and pass --executions eager,compile")
    return made[0], made[1], made[2]


def custom_batch(name: str, make_batch: MakeBatch, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return a custom model's batch, or raise CannotTrain unless it is two tensors of `batch_size` rows."""
    made = make_batch(batch_size)
    is_two = isinstance(made, tuple) and len(made) == 2
    if not is_two or not all(isinstance(part, Tensor) and part.shape[:1] == (batch_size,) for part in made):
        why = f"must return inputs and targets, two tensors of {batch_size} rows, got {_describe(made)}"
        raise CannotTrain(f"the batch maker of {name} {why}")
    return made


def _describe(made: object) -> str:
    """Return the type of a value or the types in a tuple, and the shapes of tensors."""
    parts = made if isinstance(made, tuple) else (made,)
    shapes = (f" {list(part.shape)}" if isinstance(part, Tensor) else "" for part in parts)
    types = (f"{type(part).__name__}{shape}" for part, shape in zip(parts, shapes, strict=True))
    return f"({', '.join(types)})" if isinstance(made, tuple) else "".join(types)


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
