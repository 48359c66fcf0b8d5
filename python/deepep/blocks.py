"""Several tensors in one piece of memory: one allocation, one look whether peers can reach it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

ALIGNMENT = 256
"""Bytes; also keeps neighbours off one cache line."""

Part = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor to be made."""


def num_bytes(parts: Sequence[Part]) -> int:
    """Bytes of a piece for all parts, each rounded up to ALIGNMENT."""
    return _plan(tuple(parts)).total


class _Plan(NamedTuple):
    """How parts lie in a piece: offsets in bytes, and what as_strided needs of each."""

    offsets: tuple[int, ...]
    total: int
    views: tuple[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int], ...]


@functools.lru_cache(maxsize=256)  # a model makes the same calls again and again
def _plan(parts: tuple[Part, ...]) -> _Plan:
    offsets, views, at = [], [], 0
    for shape, dtype in parts:
        offsets.append(at)
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        views.append((dtype, shape, strides, at // dtype.itemsize))
        at += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return _Plan(tuple(offsets), at, tuple(views))


class Piece:
    """One piece of memory for several tensors, one behind the other.

    Their addresses are known at once, so that a kernel can be launched; the tensors, which take
    longer to make, are made while it runs.

    Args:
        parts: what is to lie in it.
        address: of num_bytes(parts) bytes.
        memory: gives the memory as a one-dimensional tensor of a dtype, which keeps it.
    """

    __slots__ = ("_memory", "_plan", "addresses")

    def __init__(
        self, parts: Sequence[Part], address: int, memory: Callable[[torch.dtype], torch.Tensor]
    ) -> None:
        self._memory = memory
        self._plan = _plan(tuple(parts))
        self.addresses = [address + offset for offset in self._plan.offsets]

    def tensors(self) -> list[torch.Tensor]:
        """The parts. They live together: the memory comes back when the last one is dropped."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        made = []
        for dtype, shape, strides, offset in self._plan.views:
            if dtype not in typed:
                typed[dtype] = self._memory(dtype)
            made.append(typed[dtype].as_strided(shape, strides, offset))
        return made


class Made:
    """The same of tensors that are there already."""

    __slots__ = ("_tensors", "addresses")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.addresses = [tensor.data_ptr() for tensor in tensors]

    def tensors(self) -> list[torch.Tensor]:
        return self._tensors


Memory = Piece | Made
