"""Gradients through dispatch and combine equal those of the same layer without communication.

All numbers are small integers, which BF16 holds exactly, so equality is exact.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from deepep import autograd
from deepep.buffer import Buffer
from deepep.testing import run_ranks
from deepep.topology import expert_range
from torch import Tensor

HIDDEN = 24


def experts(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, scales: Tensor) -> Tensor:
    """Expert e maps x to scales[e] * x * x; a token's results are weighted and added."""
    chosen = torch.where(topk_idx >= 0, scales[topk_idx.clamp(min=0)], 0.0)
    return (topk_weights * chosen).sum(1, keepdim=True) * x.float().square()


@dataclass
class Case:
    """One rank's tokens, weights and gradient of the output; all ranks' scales of experts."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    grad: Tensor


def make_cases(num_ranks: int, num_experts: int, topk: int) -> tuple[list[Case], Tensor]:
    generator = torch.Generator().manual_seed(num_ranks * 100 + topk)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    cases = []
    for rank in range(num_ranks):
        tokens = 0 if rank == 1 else 5 + 7 * rank
        ids = torch.rand(tokens, num_experts, generator=generator).argsort(1)[:, :topk]
        if tokens:
            ids[integers(0, 9, tokens, topk) < 2] = -1
            ids[0] = -1  # a token without any expert
        cases.append(
            Case(
                integers(-2, 2, tokens, HIDDEN).bfloat16(),
                ids,
                integers(1, 2, tokens, topk).float(),
                integers(-2, 2, tokens, HIDDEN).bfloat16(),
            )
        )
    return cases, integers(1, 3, num_experts).float()


@dataclass
class Results:
    out: Tensor
    grad_x: Tensor
    grad_weights: Tensor
    grad_scales: Tensor  # of one rank's experts, or of all


def layer(group: Any, cases: list[Case], all_scales: Tensor, options: dict[str, int]) -> Results:
    """One rank's part of the layer, forward and backward."""
    case = cases[group.rank()]
    num_experts = len(all_scales)
    local = expert_range(num_experts, group.size(), group.rank())
    scales = all_scales[local.start : local.stop].clone().requires_grad_()
    x = case.x.clone().requires_grad_()
    weights = case.topk_weights.clone().requires_grad_()
    with Buffer(group, timeout=20) as buffer:
        received = autograd.dispatch(buffer, x, case.topk_idx, weights, num_experts, **options)
        rows, ids, row_weights, counts, handle = received
        assert not ids.requires_grad and rows.dtype == torch.bfloat16
        assert len(counts) == (0 if "num_worst_tokens" in options else len(local))
        partial = experts(rows, ids, row_weights, scales)
        # Rows beyond the received ones are undefined.
        partial = torch.where((ids >= 0).any(1, keepdim=True), partial, 0.0)
        out = autograd.combine(buffer, partial.bfloat16(), handle)
        torch.autograd.backward(out, case.grad)
    grads = [tensor.grad for tensor in (x, weights, scales)]
    assert grads[0] is not None and grads[1] is not None and grads[2] is not None
    return Results(out.detach(), grads[0], grads[1], grads[2])


def dense(cases: list[Case], all_scales: Tensor) -> Results:
    """The same layer over all tokens in one piece, by torch's own gradients."""
    x = torch.cat([case.x for case in cases]).requires_grad_()
    weights = torch.cat([case.topk_weights for case in cases]).requires_grad_()
    scales = all_scales.clone().requires_grad_()
    out = experts(x, torch.cat([case.topk_idx for case in cases]), weights, scales).bfloat16()
    torch.autograd.backward(out, torch.cat([case.grad for case in cases]))
    assert x.grad is not None and weights.grad is not None and scales.grad is not None
    return Results(out.detach(), x.grad, weights.grad, scales.grad)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(("num_experts", "topk"), [(8, 4), (7, 1), (13, 3)])
@pytest.mark.parametrize("worst", [False, True])
def test_gradients_equal_those_of_the_dense_layer(
    num_ranks: int, num_experts: int, topk: int, worst: bool
) -> None:
    cases, scales = make_cases(num_ranks, num_experts, topk)
    options = {"num_worst_tokens": 5 + sum(len(case.x) for case in cases)} if worst else {}
    ranks = run_ranks(num_ranks, layer, cases, scales, options)
    expected = dense(cases, scales)
    for name in ("out", "grad_x", "grad_weights", "grad_scales"):
        mine = torch.cat([getattr(result, name) for result in ranks])
        assert torch.equal(mine, getattr(expected, name)), name


def test_gradient_of_a_weight_comes_only_from_the_rank_that_owns_its_expert() -> None:
    def work(group: Any) -> None:
        ids = torch.tensor([[0, 1, -1]])  # one expert on each rank, one nowhere
        weights = torch.ones(1, 3, requires_grad=True)
        with Buffer(group, timeout=20) as buffer:
            received = autograd.dispatch(
                buffer, torch.ones(1, 8).bfloat16(), ids, weights, num_experts=2
            )
            # Every rank gives every weight a gradient, those of other ranks' experts included.
            grad = torch.full((2, 3), 10.0 ** group.rank())
            torch.autograd.backward(received.topk_weights, grad)
        assert weights.grad is not None
        assert weights.grad.tolist() == [[1.0, 10.0, 0.0]]

    run_ranks(2, work)


def test_gradients_that_are_views_or_missing_are_accepted() -> None:
    def work(group: Any) -> None:
        x = torch.ones(3, 16, dtype=torch.bfloat16, requires_grad=True)
        ids = torch.tensor([[0], [1], [-1]])
        with Buffer(group, timeout=20) as buffer:
            received = autograd.dispatch(buffer, x, ids, torch.ones(3, 1), num_experts=2)
            out = autograd.combine(buffer, received.x, received.handle)
            torch.autograd.backward(out.sum())
        assert x.grad is not None
        assert x.grad[:, 0].tolist() == [1.0, 1.0, 0.0]

    run_ranks(2, work)


def test_counts_are_aligned_on_request() -> None:
    def work(group: Any) -> None:
        with Buffer(group, timeout=20) as buffer:
            x = torch.ones(3, 16).bfloat16()
            ids = torch.tensor([[0, 1], [0, -1], [1, 0]])
            received = autograd.dispatch(buffer, x, ids, torch.ones(3, 2), 2, expert_alignment=16)
            assert received.num_tokens_per_expert == [16, 16]

    run_ranks(1, work)


def test_second_derivatives_are_refused() -> None:
    def work(group: Any) -> None:
        x = torch.ones(1, 8, dtype=torch.bfloat16, requires_grad=True)
        with Buffer(group, timeout=20) as buffer:
            received = autograd.dispatch(buffer, x, torch.tensor([[0]]), torch.ones(1, 1), 1)
            (grad,) = torch.autograd.grad(received.x.square().sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                torch.autograd.backward(grad.sum())

    run_ranks(1, work)
