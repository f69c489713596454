"""The inputs that turn images into batches: one batch again and again, a data set on the device, or torch's DataLoader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from ddpperf.data.images import EpochBatches, Images

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


class Input(Protocol):
    """Where a training's batches come from: `begin` an epoch, then for each step `load` and `take`."""

    def begin(self, number: int) -> None:
        """Start epoch `number`."""

    def prepare(self, number: int) -> None:
        """Do what epoch `number` needs of the CPU, while the device is busy with the one before."""

    def load(self) -> None:
        """What the CPU does for the next batch."""

    def take(self) -> Batch:
        """The next batch: the device's part alone, so that a graph can repeat it."""


class FixedInput:
    """The same batch again and again."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def begin(self, number: int) -> None:
        """All epochs are the same."""

    def prepare(self, number: int) -> None:
        """There is nothing to prepare."""

    def load(self) -> None:
        """The batch is there."""

    def take(self) -> Batch:
        return self.batch


class DeviceInput:
    """The data set as uint8 on the device, with its random crops and flips made there, a batch at a time.

    As torchvision's RandomCrop(padding=4) and RandomHorizontalFlip do, each image gets an offset and a flip of its own. By
    `cutout` a square of so many pixels a side is hidden, too: its middle is any pixel, so that it may lie partly outside, and
    what is hidden has the data set's mean (DeVries & Taylor 2017, "Improved Regularization of CNNs with Cutout").
    An epoch's order and offsets lie on the device from its start, and a counter of its batches: taking one is the same work
    every time, at the same addresses.
    """

    def __init__(
        self,
        images: Images,
        batches: EpochBatches,
        device: torch.device,
        memory_format: torch.memory_format,
        *,
        cutout: int = 0,
    ) -> None:
        self.padded = (
            F.pad(images.pixels.to(device), (PADDING,) * 4).permute(0, 2, 3, 1).contiguous()
        )  # [N, H+8, W+8, 3]
        self.labels = images.labels.to(device)
        self.batches = batches
        self.device = device
        self.memory_format = memory_format
        self.cutout = cutout
        self.rank = batches.sampler.rank
        channels = {"device": device, "dtype": torch.float32}
        self.mean = torch.tensor(MEAN, **channels) * 255  # type: ignore[arg-type]
        self.inverse_std = 1 / (torch.tensor(STD, **channels) * 255)  # type: ignore[arg-type]
        height, width = (size - 2 * PADDING for size in self.padded.shape[1:3])
        self.down, self.across = torch.arange(height, device=device), torch.arange(width, device=device)
        self.mirrored = self.across.flip(0)
        self.places = torch.arange(batches.shard.batch_size, device=device)  # in a batch
        self.next_places = self.places  # fewer in an epoch's last
        self.first = torch.zeros(
            (), dtype=torch.int64, device=device
        )  # the place in the epoch where the next batch begins
        self.plan = torch.zeros(0)
        self.prepared = -1, self.plan  # an epoch's number, and its plan in the CPU's memory
        self.remaining = 0  # images of the epoch

    def of_batches(self, batches: EpochBatches) -> DeviceInput:
        """The same images, in other batches."""
        other = copy.copy(self)
        other.batches = batches
        other.next_places = other.places = torch.arange(batches.shard.batch_size, device=self.device)
        other.first = torch.zeros_like(self.first)
        other.plan = torch.zeros(0)
        other.prepared = -1, other.plan
        return other

    def prepare(self, number: int) -> None:
        """The epoch's plan [4, images] in the CPU's memory: each image's index, offsets and flip; with cutout [6, images], and
        where its hidden square begins."""
        self.batches.set_epoch(number)
        order = torch.tensor([index for batch in self.batches for index in batch])
        drawn = Random(f"{self.batches.sampler.seed} {self.rank} {number}")
        generator = torch.Generator().manual_seed(drawn.getrandbits(32))  # torch reads no more of it
        offsets = torch.randint(2 * PADDING + 1, (2, len(order)), generator=generator)
        flips = torch.randint(2, (1, len(order)), generator=generator)
        parts = [order[None], offsets, flips]
        if self.cutout:
            middles = [
                torch.randint(len(places), (len(order),), generator=generator)
                for places in (self.down, self.across)
            ]
            parts.append(torch.stack(middles) - self.cutout // 2)
        plan = torch.cat(parts)
        self.prepared = number, plan.pin_memory() if self.device.type == "cuda" else plan

    def begin(self, number: int) -> None:
        if self.prepared[0] != number:
            self.prepare(number)
        _, plan = self.prepared
        if self.plan.shape != plan.shape:
            self.plan = plan.to(self.device)
        else:
            self.plan.copy_(plan, non_blocking=True)  # in place: a graph reads it there
        self.first.zero_()
        self.remaining = plan.shape[1]

    def load(self) -> None:
        size = min(len(self.places), self.remaining)
        self.next_places = self.places[:size]
        self.remaining -= size

    def take(self) -> Batch:
        index, top, left, flipped, *corner = self.plan[:, self.first + self.next_places]
        self.first.add_(len(self.next_places))
        rows = top[:, None] + self.down
        columns = left[:, None] + torch.where(flipped[:, None] > 0, self.mirrored, self.across)
        pixels = self.padded[index[:, None, None], rows[:, :, None], columns[:, None, :]]  # [batch, H, W, 3]
        images = pixels.sub(self.mean).mul_(self.inverse_std)
        if self.cutout:
            inside = [
                (begin[:, None] <= places) & (places < begin[:, None] + self.cutout)
                for begin, places in zip(corner, (self.down, self.across), strict=True)
            ]
            images.masked_fill_((inside[0][:, :, None] & inside[1][:, None, :])[..., None], 0.0)
        images = images.permute(0, 3, 1, 2)
        return images.contiguous(memory_format=self.memory_format), self.labels[index]


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
        context = (
            torch.multiprocessing.get_context("forkserver") if workers else None
        )  # never forked: CUDA is in use
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
        self.loaded: Iterator[Batch] = iter(())
        self.batch: Batch = torch.empty(0), torch.empty(0)

    def begin(self, number: int) -> None:
        self.batches.set_epoch(number)
        self.loaded = iter(self.loader)

    def prepare(self, number: int) -> None:
        """The workers start with an epoch when it begins, as in any training."""

    def load(self) -> None:
        images, labels = next(self.loaded)
        if self.batch[0].shape != images.shape:
            on_device = images.to(self.device, non_blocking=True, memory_format=self.memory_format)
            self.batch = on_device, labels.to(self.device, non_blocking=True)
        else:  # in place: a graph reads it there
            self.batch[0].copy_(images, non_blocking=True)
            self.batch[1].copy_(labels, non_blocking=True)

    def take(self) -> Batch:
        return self.batch


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
        raise ImportError(
            "input dataloader needs torchvision, which this interpreter has not; install it"
        ) from error
    steps: Sequence[Callable[[Tensor], Tensor]] = (
        transforms.RandomCrop(size, padding=PADDING),
        transforms.RandomHorizontalFlip(),
        transforms.ConvertImageDtype(torch.float32),
        transforms.Normalize(MEAN, STD),
    )
    composed: Callable[[Tensor], Tensor] = transforms.Compose(steps)
    return composed
