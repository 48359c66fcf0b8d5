"""Several tensors in one piece of memory: one allocation, one look whether peers can reach it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

ALIGNMENT = 256
"""Bytes; also keeps neighbours off one cache line."""

Part = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor to be made."""


def num_bytes(parts: Sequence[Part]) -> int:
    """Bytes of a piece for all parts, each rounded up to ALIGNMENT."""
    return _places(parts)[-1]


def _places(parts: Sequence[Part]) -> list[int]:
    """Where each part begins, in bytes; last where a further one would."""
    places, at = [0], 0
    for shape, dtype in parts:
        at += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        places.append(at)
    return places


class Piece:
    """One piece of memory for several tensors, one behind the other.

    Their addresses are known at once, so that a kernel can be launched; the tensors, which take
    longer to make, are made while it runs.

    Args:
        parts: what is to lie in it.
        address: of num_bytes(parts) bytes.
        memory: gives the memory as a one-dimensional tensor of a dtype, which keeps it.
    """

    __slots__ = ("_memory", "_parts", "_places", "addresses")

    def __init__(
        self, parts: Sequence[Part], address: int, memory: Callable[[torch.dtype], torch.Tensor]
    ) -> None:
        self._parts = parts
        self._memory = memory
        self._places = _places(parts)
        self.addresses = [address + place for place in self._places[:-1]]

    def tensors(self) -> list[torch.Tensor]:
        """The parts. They live together: the memory comes back when the last one is dropped."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        made = []
        for (shape, dtype), place in zip(self._parts, self._places, strict=False):
            if dtype not in typed:
                typed[dtype] = self._memory(dtype)
            made.append(typed[dtype].as_strided(shape, _strides(shape), place // dtype.itemsize))
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


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 2:  # by far the most frequent
        return (shape[1], 1)
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
