"""Received rows in the order of experts, as grouped matrix products want them, and back.

    plan = expert_major(topk_idx, num_local_experts, alignment=16)
    y = experts(permute(x, plan), plan.num_rows_per_expert)
    out = unpermute(y, topk_weights, plan)

No loop over tokens or experts, on any device; forward and backward only gather, so results do not
depend on an order of additions that a GPU chooses. Needs torch 2.4. Letters: n rows with K choices
each, El experts, m expert-major rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from deepep.operators import data_dependent_size, operator


class Plan(NamedTuple):
    """Where each choice of an expert lies in expert-major order, in both directions.

    Attributes:
        source: int64 [m]; the choice (row * K + slot) at each place, -1 for padding.
        position: int64 [n, K]; the place of each choice, -1 where the id is -1.
        num_rows_per_expert: int64 [El]; places of each expert, padding included.
    """

    source: torch.Tensor
    position: torch.Tensor
    num_rows_per_expert: torch.Tensor


def max_rows(num_rows: int, num_topk: int, num_local_experts: int, alignment: int = 1) -> int:
    """A number of places that is enough for any choices: what `num_places` may be."""
    return num_rows * num_topk + num_local_experts * (alignment - 1)


def expert_major(
    topk_idx: torch.Tensor, num_local_experts: int, alignment: int = 1, num_places: int = 0
) -> Plan:
    """Sorts choices by expert, and those of one expert by row.

    Args:
        topk_idx: int64 or int32 [n, K]; 0..El-1, or -1 for none.
        num_local_experts: El, at least 1.
        alignment: each expert's places are padded to a multiple of this.
        num_places: m, if positive; it must be enough (see max_rows). Else it is as small as can
            be, at least 1 where n is, which on a GPU the host waits for.
    """
    if num_local_experts < 1 or alignment < 1:
        raise ValueError(f"{num_local_experts=}, {alignment=}: both must be at least 1.")
    return Plan(*_expert_major(topk_idx, num_local_experts, alignment, num_places))


def _run_expert_major(
    topk_idx: torch.Tensor, num_local_experts: int, alignment: int, num_places: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = topk_idx.reshape(-1).long()
    # Choices of nothing come last, behind the last expert.
    expert, choice = torch.where(ids < 0, num_local_experts, ids).sort(stable=True)
    bounds = torch.arange(num_local_experts + 1, device=ids.device)
    start = torch.searchsorted(expert, bounds)
    counts = (start[1:] - start[:-1] + (alignment - 1)) // alignment * alignment
    ends = counts.cumsum(0)
    num_places = num_places or max(int(ends[-1]), min(topk_idx.shape[0], 1))
    # From places without padding to places with it.
    shift = torch.zeros_like(bounds)
    shift[:-1] = ends - counts - start[:-1]
    place = torch.arange(len(ids), device=ids.device) + shift[expert]
    chosen = expert < num_local_experts
    source = ids.new_full((num_places + 1,), -1)
    source[torch.where(chosen, place, num_places)] = choice  # the last one is the waste bin
    position = torch.empty_like(ids)
    position[choice] = torch.where(chosen, place, -1)
    return source[:num_places].clone(), position.view(topk_idx.shape), counts


def _expert_major_shapes(
    topk_idx: torch.Tensor, num_local_experts: int, alignment: int, num_places: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    places = num_places or data_dependent_size()
    return (
        topk_idx.new_empty((places,), dtype=torch.int64),
        topk_idx.new_empty(topk_idx.shape, dtype=torch.int64),
        topk_idx.new_empty((num_local_experts,), dtype=torch.int64),
    )


_expert_major = operator(
    "expert_major",
    "(Tensor topk_idx, int num_local_experts, int alignment, SymInt num_places) "
    "-> (Tensor, Tensor, Tensor)",
    _run_expert_major,
    _expert_major_shapes,
)


def _gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of x by number; zeros where it is -1, whatever x holds."""
    return x[index.clamp(min=0)].masked_fill((index < 0)[:, None], 0)


def _rows_of(plan_source: torch.Tensor, num_topk: int) -> torch.Tensor:
    """The row of each place, -1 for padding."""
    return torch.div(plan_source, num_topk, rounding_mode="floor")


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, source: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(position)
        return _gather(x, _rows_of(source, position.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (position,) = ctx.saved_tensors
        total = _gather(grad, position[:, 0]).float()
        for slot in range(1, position.shape[1]):
            total = total + _gather(grad, position[:, slot]).float()
        return total.to(grad.dtype), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        weights: torch.Tensor,
        source: torch.Tensor,
        position: torch.Tensor,
    ) -> torch.Tensor:
        # Weights of unchosen slots may be undefined.
        weights = weights.masked_fill(position < 0, 0.0)
        ctx.save_for_backward(y, weights, source, position)
        total = weights[:, :1] * _gather(y, position[:, 0])
        for slot in range(1, position.shape[1]):
            total = total + weights[:, slot, None] * _gather(y, position[:, slot])
        return total.to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        y, weights, source, position = ctx.saved_tensors
        places = weights.reshape(-1, 1)
        grad_y = _gather(places, source) * _gather(grad, _rows_of(source, position.shape[1]))
        wide = grad.float()
        grad_weights = [
            (wide * _gather(y, position[:, slot])).sum(1) for slot in range(position.shape[1])
        ]
        return grad_y.to(y.dtype), torch.stack(grad_weights, 1), None, None


def permute(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """[n, H] to expert-major [m, H]; padding is zero. Differentiable."""
    apply: Any = _Permute.apply  # torch gives it no type
    rows: torch.Tensor = apply(x, plan.source, plan.position)
    return rows


def unpermute(y: torch.Tensor, topk_weights: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Each row's weighted sum over its experts: [m, H] and float32 [n, K] to [n, H].

    Added in FP32, in the order of slots, and rounded once to y's type; 0 for a row without any
    expert here. Differentiable in y and the weights.
    """
    apply: Any = _Unpermute.apply
    rows: torch.Tensor = apply(y, topk_weights, plan.source, plan.position)
    return rows
