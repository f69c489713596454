"""Keep a rank at the faster of the two paces at which a GPU replays CUDA graphs.

A process replays CUDA graphs at the fast pace until it loads the kernels of its first convolution
or matrix product. From then on each kernel of a graph takes longer, by 0.18 us for the smallest
kernels and by 0.36 us on average in a training step (one H200). If any CUDA context is then created
or destroyed on the GPU, the process returns to the fast pace. It is slow again after a replay in
another CUDA stream (four H100s). Without help, the pace depends on which other processes come and
go, and steps of small kernels differ by up to 7% between runs.
"""

from __future__ import annotations

import ctypes
import math

import torch

from ddpperf.measuring.clock import keep_busy, seconds_of
from ddpperf.results.samples import SLOW_PACE

KERNELS = 200  # in the timed graph
REPLAYS = 8
TIMINGS = 3  # at most, of a graph that looks slow
BUSY_SECONDS = 1e-3  # longer than the launch of a replay


class GpuPace:
    """Measures how fast this process replays CUDA graphs, by timing a small graph on request.

    Construct it before the first convolution or matrix product, so that the first timing shows the
    fast pace. Other processes that start at the same time can make the first timing longer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph, number = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
        number.add_(1)  # loads the kernel, which a capture may not do
        torch.cuda.synchronize(device)
        with torch.cuda.graph(self._graph):
            for _ in range(KERNELS):
                number.add_(1)
        self._number = number  # the graph writes to its memory
        self._fast = self._seconds()
        self._restored = False

    def _seconds(self) -> float:
        """Return the shortest GPU time of several replays; other processes only make a replay longer.

        The GPU spins while the CPU launches a replay, so that a slow launch does not count.
        """
        seconds = []
        for _ in range(REPLAYS):
            keep_busy(BUSY_SECONDS)
            seconds.append(seconds_of(self._graph.replay, 1, self._device))
        return min(seconds)

    def slowdown(self) -> float:
        """Return the small graph's present time, divided by its time when the process was fast.

        A graph that looks slow is timed again: at the slow pace all timings are slow, but something
        else may have delayed one of them.
        """
        slowdown = math.inf
        for _ in range(TIMINGS):
            seconds = self._seconds()
            self._fast = min(self._fast, seconds)
            slowdown = min(slowdown, seconds / self._fast)
            if slowdown <= SLOW_PACE:
                break
        return slowdown

    def restore(self) -> None:
        """Return to the fast pace, by creating and destroying a second CUDA context.

        After the first call, this is done only if the small graph became slower.
        """
        if not self._restored or self.slowdown() > SLOW_PACE:
            self._restored = create_and_destroy_context(self._device.index)


def create_and_destroy_context(gpu: int) -> bool:
    """Create and destroy a second CUDA context, and return whether that succeeded."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    own, second, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    if cuda.cuCtxGetCurrent(ctypes.byref(own)) or cuda.cuDeviceGet(ctypes.byref(device), gpu):
        return False
    created = cuda.cuCtxCreate_v2(ctypes.byref(second), 0, device) == 0
    destroyed = created and cuda.cuCtxDestroy_v2(second) == 0
    return destroyed and int(cuda.cuCtxSetCurrent(own)) == 0
