"""Crop, flip and mix images at random on the device that trains."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpperf.data.images import MEAN, STD, Images

PADDING = 4  # of a random crop
Batch = tuple[Tensor, Tensor]  # images and labels


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
