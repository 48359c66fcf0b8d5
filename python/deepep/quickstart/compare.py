"""How far tensors of the sharded computation are from those of the one in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.linalg import vector_norm

from deepep.quickstart.results import Difference


def compare(name: str, ours: torch.Tensor, reference: torch.Tensor) -> Difference:
    """Compares two tensors of the same shape.

    Raises:
        ValueError: the shapes differ.
    """
    if ours.shape != reference.shape:
        raise ValueError(
            f"{name} is {list(ours.shape)} on the ranks and {list(reference.shape)} in one "
            "process; both must hold the tokens, or experts, of all ranks."
        )
    if ours.numel() == 0:
        return Difference(name, 0, 0.0, 0.0)
    reference = reference.float()
    difference = ours.float() - reference

    def relative(norm: float) -> float:
        error, size = (float(vector_norm(x, norm)) for x in (difference, reference))
        return error / size if error and size else error

    return Difference(name, ours.numel(), relative(math.inf), relative(2))


def compare_all(
    ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> list[Difference]:
    """Compares tensors of the same names.

    Raises:
        ValueError: names or shapes differ.
    """
    if ours.keys() != reference.keys():
        raise ValueError(
            f"On the ranks there are {sorted(ours)}, in one process {sorted(reference)}; compare "
            "the same tensors."
        )
    return [compare(name, ours[name], reference[name]) for name in ours]
