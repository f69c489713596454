"""Inputs of training steps: one fixed batch, images stored on the device, or torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch
from torch.utils.data import DataLoader

from ddpperf.data.augmentation import Batch, DeviceImages
from ddpperf.data.images import MEAN, MEMORY_FORMATS, STD, Images, load_images
from ddpperf.data.sampler import EpochBatches
from ddpperf.specs import RunSpec, TrainingSpec


class Input:
    """Input that returns the same batch at every step, and base class of all other inputs.

    Call `begin` for each epoch, then `load` and `take` for each step.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def begin(self, number: int) -> None:
        """Start to read the batches of epoch `number`."""

    def prepare(self, number: int) -> None:
        """Do the CPU's work for an epoch while the device still computes the epoch before."""

    def load(self, arrived: Callable[[], None] = lambda: None) -> None:
        """Prepare the next training batch on the CPU, and start to copy it to the device.

        arrived: called when a batch that the CPU had to wait for is in the CPU's memory, before the
        batch is copied to the device.
        """

    def take(self) -> Batch:
        """Return the next training batch, which is a tensor of images and a tensor of labels.

        Only the device works here, so that a CUDA graph can repeat it.
        """
        return self.batch


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

    A fork server starts the spec's loader workers in `begin`. Without workers, the transforms run in
    this process.
    """

    def __init__(self, spec: TrainingSpec, batches: EpochBatches, device: torch.device) -> None:
        super().__init__((torch.empty(0), torch.empty(0)))
        # a process that uses CUDA cannot be forked
        workers = spec.loader_workers
        context = torch.multiprocessing.get_context("forkserver") if workers else None
        if context is not None:
            context.set_forkserver_preload([__name__, "torchvision.transforms"])
        self.batches, self.device, self.memory_format = batches, device, MEMORY_FORMATS[spec.memory_format]
        self.loader = DataLoader(
            TransformedImages(spec),
            batch_sampler=batches,
            num_workers=workers,
            multiprocessing_context=context,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
        )
        self.loaded: Iterator[Batch] = iter(())

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


class TransformedImages(torch.utils.data.Dataset[Batch]):
    """Dataset that crops, flips and normalizes one image at a time, as CIFAR-10's images usually are.

    Each loader process opens the images itself, and needs torchvision.
    """

    def __init__(self, spec: TrainingSpec) -> None:
        self.spec = spec
        self.loaded: Images | None = None

    def __getitem__(self, index: int) -> Batch:
        if self.loaded is None:
            from torchvision import transforms  # here, because most inputs do not need it

            self.loaded = load_images(self.spec)
            crop = transforms.RandomCrop(self.loaded.pixels.shape[2:], padding=RunSpec.crop_padding)
            convert, normalize = transforms.ConvertImageDtype(torch.float32), transforms.Normalize(MEAN, STD)
            self.transform = transforms.Compose((crop, transforms.RandomHorizontalFlip(), convert, normalize))
        return self.transform(self.loaded.pixels[index]), self.loaded.labels[index]
