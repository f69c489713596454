"""Inputs of training steps: one fixed batch, images stored on the device, or torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from ddpperf.data.images import EpochBatches, Images

PADDING = 4  # of a random crop
# of CIFAR-10, by channel, for values from 0 to 1
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

Batch = tuple[Tensor, Tensor]


def normalized(pixels: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Convert uint8 images [N, 3, H, W] to float32 with about zero mean and unit variance.

    The mean and the standard deviation are those of CIFAR-10.
    """
    mean = torch.tensor(MEAN, device=pixels.device).view(3, 1, 1) * 255
    std = torch.tensor(STD, device=pixels.device).view(3, 1, 1) * 255
    return ((pixels - mean) / std).contiguous(memory_format=memory_format)


class Input:
    """Base class of the sources of training batches.

    Call `begin` for each epoch, then `load` and `take` for each step. Methods other than `take` do
    nothing by default.
    """

    def begin(self, number: int) -> None:
        """Start to read the batches of epoch `number`."""

    def prepare(self, number: int) -> None:
        """Do the CPU's work for an epoch while the device still computes the epoch before."""

    def load(self, arrived: Callable[[], None] = lambda: None) -> None:
        """Do the CPU's work for the next training batch.

        arrived: called when a batch that the CPU had to wait for is in the CPU's memory, before the
        batch is copied to the device.
        """

    def take(self) -> Batch:
        """Return the next training batch, which is a tensor of images and a tensor of labels.

        Only the device works here, so that a CUDA graph can repeat it.
        """
        raise NotImplementedError


class FixedInput(Input):
    """Input that returns the same training batch at every step."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def take(self) -> Batch:
        return self.batch


class DeviceImages:
    """A data set stored as uint8 on the device, where batches are cropped, flipped and normalized.

    padding: the pixels of zeros around each image before the random crop. uncropped_from: the first
    epoch without random crops; None for random crops in all epochs.
    cutmix: the fraction of the images in which a rectangle shows the image before in the batch (Yun
    et al. 2019, "CutMix"). The rectangle's area is a uniformly random fraction of the image, less
    what lies outside.
    """

    def __init__(
        self,
        images: Images,
        device: torch.device,
        memory_format: torch.memory_format,
        *,
        padding: int = PADDING,
        uncropped_from: int | None = None,
        cutmix: float = 0.0,
    ) -> None:
        padded = F.pad(images.pixels.to(device), (padding,) * 4)
        self.padded = padded.permute(0, 2, 3, 1).contiguous()  # [N, H + 2 padding, W + 2 padding, 3]
        self.labels = images.labels.to(device)
        self.classes = int(images.labels.max()) + 1
        self.device, self.memory_format = device, memory_format
        self.padding, self.uncropped_from, self.cutmix = padding, uncropped_from, cutmix
        self.mean = torch.tensor(MEAN, device=device) * 255
        self.inverse_std = 1 / (torch.tensor(STD, device=device) * 255)
        height, width = images.pixels.shape[2:]
        self.rows, self.columns = torch.arange(height, device=device), torch.arange(width, device=device)
        self.mirrored = self.columns.flip(0)

    def plan(self, order: Tensor, generator: torch.Generator, epoch: int = 0) -> Tensor:
        """Draw the random crop, flip and CutMix of each image of an epoch.

        Returns int64 [4, images] in the CPU's memory, with the rows index, top offset, left offset
        and flip. With CutMix, four rows follow: the first row and column of the rectangle, and its
        height and width.
        """
        count, sizes = len(order), (len(self.rows), len(self.columns))
        offsets = torch.randint(2 * self.padding + 1, (2, count), generator=generator)
        if self.uncropped_from is not None and epoch >= self.uncropped_from:
            offsets.fill_(self.padding)
        flips = torch.randint(2, (1, count), generator=generator)
        parts = [order[None], offsets, flips]
        if self.cutmix:
            area, chance, *middles = torch.rand(4, count, generator=generator)
            side = area.sqrt() * (chance < self.cutmix)
            lengths = [(size * side).round() for size in sizes]
            placed = zip(sizes, middles, lengths, strict=True)
            firsts = [(size * middle - length / 2).round() for size, middle, length in placed]
            parts.append(torch.stack([*firsts, *lengths]).long())
        plan = torch.cat(parts)
        return plan.pin_memory() if self.device.type == "cuda" else plan

    def batch(self, plan: Tensor) -> Batch:
        """Return the images and labels of a batch, cropped and flipped as an epoch's plan says.

        With CutMix, the labels are probabilities of shape [batch, classes].
        """
        index, top, left, flipped, *rectangles = plan
        rows = top[:, None] + self.rows
        columns = left[:, None] + torch.where(flipped[:, None] > 0, self.mirrored, self.columns)
        pixels = self.padded[index[:, None, None], rows[:, :, None], columns[:, None, :]]  # [batch, H, W, 3]
        images = pixels.sub(self.mean).mul_(self.inverse_std)
        labels = self.labels[index]
        if self.cutmix:
            row, column, height, width = rectangles
            in_rows, in_columns = _inside(self.rows, row, height), _inside(self.columns, column, width)
            mixed = in_rows[:, :, None] & in_columns[:, None, :]  # [batch, H, W]
            images = torch.where(mixed[..., None], images.roll(1, 0), images)
            fraction = mixed.float().mean((1, 2))[:, None]
            own = F.one_hot(labels, self.classes).float()
            labels = own + fraction * (own.roll(1, 0) - own)
        images = images.permute(0, 3, 1, 2)
        return images.contiguous(memory_format=self.memory_format), labels


def _inside(places: Tensor, first: Tensor, length: Tensor) -> Tensor:
    """Return which rows or columns lie in each image's rectangle, as bool [batch, places]."""
    return (first[:, None] <= places) & (places < (first + length)[:, None])


class DeviceInput(Input):
    """Input that keeps all images on the device, and crops and flips them there at random.

    The crops and flips are those of torchvision's RandomCrop(padding=4) and RandomHorizontalFlip,
    drawn for each image. The epoch's plan and a counter of images are on the device, so that taking
    a batch is always the same work at the same addresses.
    """

    def __init__(self, images: DeviceImages, batches: EpochBatches) -> None:
        self.images, self.batches = images, batches
        self.places = torch.arange(batches.shard.batch_size, device=images.device)  # in a batch
        self.next_places = self.places  # fewer in an epoch's last batch
        self.first = torch.tensor(0, device=images.device)  # the next batch's first image
        self.plan = torch.zeros(0)
        self.prepared = -1, self.plan  # an epoch's number and its plan in the CPU's memory
        self.remaining = 0  # images of the epoch

    def prepare(self, number: int) -> None:
        self.batches.set_epoch(number)
        order = torch.tensor([index for batch in self.batches for index in batch])
        sampler = self.batches.sampler
        seed = Random(f"{sampler.seed} {sampler.rank} {number}").getrandbits(32)  # torch reads no more bits
        self.prepared = number, self.images.plan(order, torch.Generator().manual_seed(seed), number)

    def begin(self, number: int) -> None:
        if self.prepared[0] != number:
            self.prepare(number)
        _, plan = self.prepared
        if self.plan.shape != plan.shape:
            self.plan = plan.to(self.images.device)
        else:
            self.plan.copy_(plan, non_blocking=True)  # in place: a CUDA graph reads this memory
        self.first.zero_()
        self.remaining = plan.shape[1]

    def load(self, arrived: Callable[[], None] = lambda: None) -> None:
        del arrived  # there is nothing to wait for
        size = min(len(self.places), self.remaining)
        self.next_places = self.places[:size]
        self.remaining -= size

    def take(self) -> Batch:
        plan = self.plan[:, self.first + self.next_places]
        self.first.add_(len(self.next_places))
        return self.images.batch(plan)


class LoaderInput(Input):
    """Input that reads training batches from a torch DataLoader with torchvision's transforms.

    workers: the number of loader processes, which a fork server starts in `begin`. With 0 the
    transforms run in this process.
    """

    def __init__(
        self,
        images: Callable[[], Images],
        batches: EpochBatches,
        workers: int,
        device: torch.device,
        memory_format: torch.memory_format,
    ) -> None:
        # a process that uses CUDA cannot be forked
        context = torch.multiprocessing.get_context("forkserver") if workers else None
        if context is not None:
            context.set_forkserver_preload([__name__, "torchvision.transforms"])
        self.batches, self.device, self.memory_format = batches, device, memory_format
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

    def load(self, arrived: Callable[[], None] = lambda: None) -> None:
        images, labels = next(self.loaded)
        arrived()
        if self.batch[0].shape != images.shape:
            on_device = images.to(self.device, non_blocking=True, memory_format=self.memory_format)
            self.batch = on_device, labels.to(self.device, non_blocking=True)
        else:  # in place: a CUDA graph reads this memory
            self.batch[0].copy_(images, non_blocking=True)
            self.batch[1].copy_(labels, non_blocking=True)

    def take(self) -> Batch:
        return self.batch


class TransformedImages(torch.utils.data.Dataset[Batch]):
    """Dataset that crops, flips and normalizes one image at a time, as CIFAR-10's images usually are.

    Each loader process opens the images itself, and needs torchvision.
    """

    def __init__(self, images: Callable[[], Images]) -> None:
        self.images = images
        self.loaded: Images | None = None

    def __getitem__(self, index: int) -> Batch:
        if self.loaded is None:
            from torchvision import transforms  # here, because most inputs do not need it

            self.loaded = self.images()
            crop = transforms.RandomCrop(self.loaded.pixels.shape[2:], padding=PADDING)
            convert, normalize = transforms.ConvertImageDtype(torch.float32), transforms.Normalize(MEAN, STD)
            self.transform = transforms.Compose((crop, transforms.RandomHorizontalFlip(), convert, normalize))
        return self.transform(self.loaded.pixels[index]), self.loaded.labels[index]
