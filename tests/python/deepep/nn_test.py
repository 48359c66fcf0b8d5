"""ExpertParallel among 1, 2 and 4 ranks against the same layer over all tokens in one piece.

Rows are BF16, everything else FP32. Results are rounded to BF16 three times: an expert's result, a
rank's sum, the sum over ranks. Each costs at most 2^-9 of the largest summand, so 2^-6 of the
largest value is allowed; a wrong row or weight is off by the value itself.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from deepep.buffer import Buffer
from deepep.nn import ExpertParallel
from deepep.testing import run_ranks
from deepep.topology import expert_range
from torch import Tensor
from torch.nn import Module, Parameter, functional

HIDDEN, INNER, TOPK = 64, 32, 3
TOLERANCE = 2.0**-6


class Router(Module):
    """Softmax over all experts, the best K of them."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = Parameter(weight.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (x.float() @ self.weight).softmax(1).topk(TOPK, 1)
        return ids, weights / weights.sum(1, keepdim=True)


class Experts(Module):
    """Two matrices each; every row is multiplied with those of its expert."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = Parameter(up.clone()), Parameter(down.clone())

    def forward(self, rows: Tensor, num_rows_per_expert: Tensor) -> Tensor:
        places = torch.arange(rows.shape[0], device=rows.device)
        expert = torch.searchsorted(num_rows_per_expert.cumsum(0), places, right=True)
        expert = expert.clamp(max=self.up.shape[0] - 1)  # of places behind the last expert
        inner = functional.gelu(torch.bmm(rows.float()[:, None], self.up[expert]))
        return torch.bmm(inner, self.down[expert])[:, 0].to(rows.dtype)


@dataclass
class Model:
    """Everything that a run needs, for all ranks."""

    x: list[Tensor]
    grad: list[Tensor]
    router: Tensor
    up: Tensor
    down: Tensor

    @property
    def num_experts(self) -> int:
        return len(self.up)


def model(num_ranks: int, num_experts: int) -> Model:
    g = torch.Generator().manual_seed(10 * num_ranks + num_experts)
    tokens = [0 if rank == 1 else 7 + 9 * rank for rank in range(num_ranks)]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    return Model(
        [normal(count, HIDDEN).bfloat16() for count in tokens],
        [normal(count, HIDDEN).bfloat16() for count in tokens],
        normal(HIDDEN, num_experts) * HIDDEN**-0.5,
        normal(num_experts, HIDDEN, INNER) * HIDDEN**-0.5,
        normal(num_experts, INNER, HIDDEN) * INNER**-0.5,
    )


Results = dict[str, Tensor]


def sharded(
    group: Any, made: Model, options: dict[str, int], per_node: int | None = None
) -> Results:
    """One rank's output and gradients."""
    x = made.x[group.rank()].clone().requires_grad_()
    with Buffer(group, device="cpu", timeout=60, ranks_per_node=per_node) as buffer:
        local = expert_range(made.num_experts, buffer.group_size, buffer.rank)
        mine = slice(local.start, local.stop)
        layer = ExpertParallel(
            buffer,
            Router(made.router),
            Experts(made.up[mine], made.down[mine]),
            made.num_experts,
            **options,
        )
        assert layer.local_experts == local
        out = layer(x)
        torch.autograd.backward(out, made.grad[group.rank()])
    return results(out, x, layer.router, layer.experts)


def results(out: Tensor, x: Tensor, router: Any, experts: Any) -> Results:
    grads = {"x": x, "router": router.weight, "up": experts.up, "down": experts.down}
    return {"out": out.detach(), **{name: tensor.grad for name, tensor in grads.items()}}


def dense(made: Model) -> Results:
    """All experts for all tokens."""
    x = torch.cat(made.x).requires_grad_()
    router, experts = Router(made.router), Experts(made.up, made.down)
    ids, weights = router(x)
    chosen = torch.zeros(len(x), made.num_experts).scatter(1, ids, weights)
    inner = functional.gelu(torch.einsum("th,ehi->tei", x.float(), experts.up))
    out = torch.einsum("tei,eih,te->th", inner, experts.down, chosen).bfloat16()
    torch.autograd.backward(out, torch.cat(made.grad))
    return results(out, x, router, experts)


def close(name: str, got: Tensor, want: Tensor) -> None:
    error = (got.float() - want.float()).abs().max().item()
    limit = TOLERANCE * want.float().abs().max().item()
    assert got.shape == want.shape and error <= limit, f"{name}: {error} of at most {limit}"


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_experts", [8, 7])
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("fixed", [False, True])
def test_output_and_gradients_are_those_of_the_dense_layer(
    num_ranks: int, num_experts: int, alignment: int, fixed: bool
) -> None:
    made = model(num_ranks, num_experts)
    options = {"expert_alignment": alignment}
    if fixed:
        options["num_worst_tokens"] = sum(map(len, made.x)) + 3
    ranks = run_ranks(num_ranks, sharded, made, options)
    want = dense(made)
    for name in ("out", "x", "up", "down"):
        close(name, torch.cat([rank[name] for rank in ranks]), want[name])
    close("router", torch.stack([rank["router"] for rank in ranks]).sum(0), want["router"])


@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("fixed", [False, True])
def test_the_same_over_nodes(per_node: int, fixed: bool) -> None:
    made = model(4, 7)
    options = {"num_worst_tokens": sum(map(len, made.x)) + 3} if fixed else {}
    ranks = run_ranks(4, sharded, made, options, per_node)
    want = dense(made)
    for name in ("out", "x", "up", "down"):
        close(name, torch.cat([rank[name] for rank in ranks]), want[name])
    close("router", torch.stack([rank["router"] for rank in ranks]).sum(0), want["router"])


def test_rows_come_in_the_order_of_experts_and_padded() -> None:
    seen = []

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        seen.append((rows[:, 0].tolist(), counts.tolist()))
        return rows

    def router(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tensor([[2, 0], [0, -1], [-1, -1]]), torch.tensor([[1.0, 2.0]] * 3)

    x = torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 8).bfloat16()
    with Buffer(device="cpu") as buffer:
        out = ExpertParallel(buffer, router, experts, 3, expert_alignment=4)(x)
    assert seen == [([1, 2, 0, 0, 1, 0, 0, 0], [4, 0, 4])]
    assert out[:, 0].tolist() == [3.0, 2.0, 0.0]


def test_leading_dimensions_are_kept() -> None:
    made = model(1, 4)
    with Buffer(device="cpu") as buffer:
        layer = ExpertParallel(buffer, Router(made.router), Experts(made.up, made.down), 4)
        x = torch.randn(2, 3, HIDDEN).bfloat16()
        assert torch.equal(layer(x).view(6, HIDDEN), layer(x.view(6, HIDDEN)))
        assert sorted(name for name, _ in layer.named_parameters()) == [
            "experts.down",
            "experts.up",
            "router.weight",
        ]
        assert "local_experts=range(0, 4)" in repr(layer)


def test_a_rank_without_an_expert_is_refused() -> None:
    def work(group: Any) -> None:
        with Buffer(group, device="cpu", timeout=20) as buffer:
            if group.rank() == 1:
                with pytest.raises(ValueError, match=r"num_experts is 1.*rank 1 has none"):
                    ExpertParallel(buffer, lambda x: (x, x), lambda rows, counts: rows, 1)

    run_ranks(2, work)
