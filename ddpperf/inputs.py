"""The inputs that turn images into batches: one batch again and again, a data set on the device, or torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from ddpperf.data import EpochBatches, Images

PADDING = 4  # of a random crop
# CIFAR-10's own, by channel, of values from 0 to 1
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

Batch = tuple[Tensor, Tensor]


def normalized(pixels: Tensor, memory_format: torch.memory_format) -> Tensor:
    """float32 images of about zero mean and unit variance, from uint8 [N, 3, H, W]."""
    mean = torch.tensor(MEAN, device=pixels.device).view(3, 1, 1) * 255
    std = torch.tensor(STD, device=pixels.device).view(3, 1, 1) * 255
    return ((pixels - mean) / std).contiguous(memory_format=memory_format)


class FixedInput:
    """The same batch, as often as an epoch has steps."""

    def __init__(self, batch: Batch, steps: int) -> None:
        self.batch = batch
        self.steps = steps

    def epoch(self, number: int) -> Iterator[Batch]:
        del number  # all are the same
        for _ in range(self.steps):
            yield self.batch


class DeviceInput:
    """The data set as uint8 on the device, with its random crops and flips made there, a batch at a time.

    As torchvision's RandomCrop(padding=4) and RandomHorizontalFlip do, each image gets an offset and a flip of its own.
    An epoch's offsets are drawn at its start; a batch is then one gather and its normalization.
    """

    def __init__(self, images: Images, batches: EpochBatches, device: torch.device, memory_format: torch.memory_format) -> None:
        self.padded = F.pad(images.pixels.to(device), (PADDING,) * 4).permute(0, 2, 3, 1).contiguous()  # [N, H+8, W+8, 3]
        self.labels = images.labels.to(device)
        self.batches = batches
        self.device = device
        self.memory_format = memory_format
        self.generator = torch.Generator(device)
        self.rank = batches.sampler.rank
        channels = {"device": device, "dtype": torch.float32}
        self.mean = torch.tensor(MEAN, **channels) * 255  # type: ignore[arg-type]
        self.inverse_std = 1 / (torch.tensor(STD, **channels) * 255)  # type: ignore[arg-type]

    def epoch(self, number: int) -> Iterator[Batch]:
        self.batches.set_epoch(number)
        indices = [index for batch in self.batches for index in batch]
        order = torch.tensor(indices, device=self.device)
        rows, columns = self._offsets(len(indices), seed=2**20 * self.rank + number)
        size = self.batches.batch_size
        for index, row, column in zip(order.split(size), rows.split(size), columns.split(size), strict=True):
            pixels = self.padded[index[:, None, None], row[:, :, None], column[:, None, :]]  # [batch, H, W, 3]
            images = pixels.sub(self.mean).mul_(self.inverse_std).permute(0, 3, 1, 2)
            yield images.contiguous(memory_format=self.memory_format), self.labels[index]

    def _offsets(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """For each image the rows [count, H] and the columns [count, W] of the padded image that it takes."""
        self.generator.manual_seed(seed)
        draw = {"generator": self.generator, "device": self.device}
        height, width = (size - 2 * PADDING for size in self.padded.shape[1:3])
        top, left = torch.randint(2 * PADDING + 1, (2, count, 1), **draw)  # type: ignore[call-overload]
        flipped = torch.randint(2, (count, 1), **draw).bool()  # type: ignore[call-overload]
        across = torch.arange(width, device=self.device)
        return top + torch.arange(height, device=self.device), left + torch.where(flipped, across.flip(0), across)


class LoaderInput:
    """A torch DataLoader with torchvision's transforms, in `workers` processes of a fork server, or in this one for 0."""

    def __init__(
        self,
        images: Callable[[], Images],
        batches: EpochBatches,
        *,
        workers: int,
        device: torch.device,
        memory_format: torch.memory_format,
    ) -> None:
        context = torch.multiprocessing.get_context("forkserver") if workers else None  # never forked: CUDA is in use
        if context is not None:
            context.set_forkserver_preload([__name__, "torchvision.transforms"])
        self.batches = batches
        self.device = device
        self.memory_format = memory_format
        self.loader = DataLoader(
            TransformedImages(images),
            batch_sampler=batches,
            num_workers=workers,
            multiprocessing_context=context,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
        )

    def epoch(self, number: int) -> Iterator[Batch]:
        self.batches.set_epoch(number)
        for images, labels in self.loader:
            on_device = images.to(self.device, non_blocking=True, memory_format=self.memory_format)
            yield on_device, labels.to(self.device, non_blocking=True)


class TransformedImages(torch.utils.data.Dataset[Batch]):
    """Images cropped, flipped and normalized one by one; each process that loads takes them from `images` itself."""

    def __init__(self, images: Callable[[], Images]) -> None:
        self.images = images
        self.loaded: Images | None = None

    def __getitem__(self, index: int) -> Batch:
        if self.loaded is None:
            self.loaded = self.images()
            self.transform = transform(self.loaded.pixels.shape[2:])
        image: Tensor = self.transform(self.loaded.pixels[index])
        return image, self.loaded.labels[index]


def transform(size: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """The usual augmentation of CIFAR-10, from uint8 [3, H, W] to normalized float32; raises
    ImportError without torchvision. size: the images' height and width."""
    try:
        from torchvision import transforms
    except ImportError as error:
        raise ImportError("input dataloader needs torchvision, which this interpreter has not; install it") from error
    steps: Sequence[Callable[[Tensor], Tensor]] = (
        transforms.RandomCrop(size, padding=PADDING),
        transforms.RandomHorizontalFlip(),
        transforms.ConvertImageDtype(torch.float32),
        transforms.Normalize(MEAN, STD),
    )
    composed: Callable[[Tensor], Tensor] = transforms.Compose(steps)
    return composed
