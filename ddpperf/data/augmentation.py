"""Crop, flip and mix images at random on the device that trains."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpperf.data.images import MEAN, MEMORY_FORMATS, STD, Images
from ddpperf.specs import RunSpec, TrainingSpec

Batch = tuple[Tensor, Tensor]  # images and labels


class DeviceImages:
    """A data set stored as uint8 on the device, where batches are cropped, flipped and normalized.

    With CutMix (Yun et al. 2019), a rectangle in some images shows the image before in the batch. Its
    area is a uniformly random fraction of the image, less what lies outside.
    spec: a training without a recipe has the defaults of recipes, which are random crops of images
    that have 4 pixels of zeros around them, in all epochs, and no CutMix.
    """

    def __init__(self, images: Images, spec: TrainingSpec, device: torch.device) -> None:
        self.recipe: Any = spec if isinstance(spec, RunSpec) else RunSpec
        self.padding, self.cutmix = self.recipe.crop_padding, self.recipe.cutmix
        self.device, self.memory_format = device, MEMORY_FORMATS[spec.memory_format]
        padded = F.pad(images.pixels.to(device), (self.padding,) * 4)
        self.padded = padded.permute(0, 2, 3, 1).contiguous()  # [N, H + 2 padding, W + 2 padding, 3]
        self.labels = images.labels.to(device)
        self.classes = int(images.labels.max()) + 1
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
        uncropped = self.recipe.uncropped_epochs
        if uncropped and epoch >= self.recipe.epochs - uncropped:
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
