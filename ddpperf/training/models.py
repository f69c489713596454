"""Build a model by its name: ResNets that need no torchvision, and torchvision's models.

A candidate build of torch often lacks torchvision. The state dicts of the ResNets are
interchangeable with those of torchvision's models of the same name. The CIFAR models have a 3x3
stem of stride 1 and no max-pool, for images of 32x32 (He et al. 2016, section 4.2, with the widths
of the ImageNet models).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpperf.errors import CannotTrain


class BasicBlock(nn.Module):
    """Residual block of a ResNet with two 3x3 convolutions."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = _downsample(in_channels, channels * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        return F.relu(x + shortcut, inplace=True)


class Bottleneck(nn.Module):
    """Residual block of a ResNet with convolutions of 1x1, 3x3 and 1x1.

    The 3x3 convolution has the stride, as in torchvision.
    """

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(in_channels, channels * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return F.relu(x + shortcut, inplace=True)


def _downsample(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )


def _stage(
    block: type[BasicBlock] | type[Bottleneck], in_channels: int, channels: int, depth: int, *, stride: int
) -> nn.Sequential:
    """Return `depth` residual blocks, of which only the first has the given stride."""
    first = block(in_channels, channels, stride)
    return nn.Sequential(first, *(block(channels * block.expansion, channels, 1) for _ in range(depth - 1)))


class ResNet(nn.Module):
    """ResNet that maps images of shape [N, 3, H, W] to logits of shape [N, num_classes].

    width: channels of the first stage. Each later stage has twice as many channels.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, ...],
        *,
        num_classes: int,
        cifar_stem: bool,
        width: int = 64,
    ) -> None:
        super().__init__()
        if cifar_stem:
            self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
            self.maxpool: nn.Module = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        widths = [width * block.expansion * 2**stage for stage in range(4)]
        self.layer1 = _stage(block, width, width, depths[0], stride=1)
        self.layer2 = _stage(block, widths[0], 2 * width, depths[1], stride=2)
        self.layer3 = _stage(block, widths[1], 4 * width, depths[2], stride=2)
        self.layer4 = _stage(block, widths[2], 8 * width, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[3], num_classes)
        self._initialize()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: ResNet(BasicBlock, (2, 2, 2, 2), num_classes=1000, cifar_stem=False),
    "resnet18_cifar": lambda: ResNet(BasicBlock, (2, 2, 2, 2), num_classes=10, cifar_stem=True),
    # needs a sixtieth of resnet18_cifar's FLOPs, so that a CPU can train it
    "resnet10_cifar": lambda: ResNet(BasicBlock, (1, 1, 1, 1), num_classes=10, cifar_stem=True, width=8),
    "resnet50_cifar": lambda: ResNet(Bottleneck, (3, 4, 6, 3), num_classes=10, cifar_stem=True),
}


def build(model: str) -> nn.Module:
    """Return a new model by its name, either a built-in model or `torchvision:NAME`.

    torchvision's models have random weights, and its vit_ models are built for images of 32x32.
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
        near = difflib.get_close_matches(name, torchvision.models.list_models(module=torchvision.models), 3)
        such = f", such as {', '.join(near)}" if near else ""
        raise CannotTrain(f"model {model} is not in torchvision; name one of its models{such}")
    sized = {"image_size": 32} if name.startswith("vit_") else {}
    built: nn.Module = torchvision.models.get_model(name, weights=None, **sized)
    return built


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
