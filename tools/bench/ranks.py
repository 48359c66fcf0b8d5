"""One rank among the others: its device, and meeting them at a moment."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """The process group of a bench, and this rank's device ("cpu" or "cuda").

    On a GPU rank r uses device r modulo the number of devices.
    """

    def __init__(self, group: Any, device: str) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.is_cuda = device == "cuda"
        self.index = self.rank % torch.cuda.device_count() if self.is_cuda else 0
        self.device = torch.device("cuda", self.index) if self.is_cuda else torch.device("cpu")
        if self.is_cuda:
            torch.cuda.set_device(self.index)
        # Long enough for everybody to learn the moment before it has come.
        crowded = len(os.sched_getaffinity(0)) < 2 * self.size
        self._margin_ns = 3_000_000 if crowded else 300_000

    def gather(self, item: Any) -> list[Any]:
        """Everybody's item, by rank."""
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.group)
        return items

    def start_together(self) -> None:
        """Returns at the same moment on all ranks.

        A barrier lets ranks go one after another; on one machine they have a clock in common.
        """
        now = torch.tensor([time.monotonic_ns()])
        dist.all_reduce(now, dist.ReduceOp.MAX, group=self.group)
        start = int(now) + self._margin_ns
        while (left := start - time.monotonic_ns()) > 0:
            if left > 200_000:
                time.sleep((left - 100_000) / 1e9)

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def copier(self, num_bytes: int) -> Any:
        """A function that copies so many bytes from one place of the device's memory to another."""
        # Random bytes: equal ones may be copied faster.
        source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source).fill_(1)
        if self.is_cuda:
            return lambda: target.copy_(source)

        arrays: list[Any] = [target.numpy(), source.numpy()]
        to, origin = (memoryview(array) for array in arrays)

        def copy() -> None:  # one memmove
            to[:] = origin

        return copy
