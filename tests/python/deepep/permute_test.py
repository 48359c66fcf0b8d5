"""Expert-major order against loops over choices; gradients against torch's own."""

import pytest
import torch
from deepep.permute import Plan, expert_major, max_rows, permute, unpermute


def choices(rows: int, topk: int, experts: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, experts, (rows, topk), generator=g)


def by_loops(ids: torch.Tensor, experts: int, alignment: int) -> tuple[list[int], list[int]]:
    """The choice at each place, and the places of each expert."""
    source: list[int] = []
    counts = []
    flat = ids.flatten().tolist()
    for expert in range(experts):
        mine = [choice for choice, chosen in enumerate(flat) if chosen == expert]
        mine += [-1] * (-len(mine) % alignment)
        source += mine
        counts.append(len(mine))
    return source, counts


@pytest.mark.parametrize("alignment", [1, 8, 128])
@pytest.mark.parametrize(
    ("rows", "topk", "experts"), [(0, 2, 3), (1, 1, 1), (17, 4, 5), (9, 3, 64)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_order_is_that_of_loops(
    rows: int, topk: int, experts: int, alignment: int, dtype: torch.dtype
) -> None:
    ids = choices(rows, topk, experts).to(dtype)
    source, counts = by_loops(ids, experts, alignment)
    spare = max_rows(rows, topk, experts, alignment)
    for places in (0, spare):
        plan = expert_major(ids, experts, alignment, places)
        assert plan.num_rows_per_expert.tolist() == counts
        length = places or max(len(source), min(rows, 1))
        assert plan.source.tolist() == source + [-1] * (length - len(source))
        assert plan.position.shape == ids.shape
        for choice, place in enumerate(plan.position.flatten().tolist()):
            assert place == (source.index(choice) if ids.flatten()[choice] >= 0 else -1)


def test_rows_of_which_none_has_an_expert_still_have_a_place_to_look_at() -> None:
    plan = expert_major(torch.full((3, 2), -1), 4)
    assert plan.source.tolist() == [-1] and plan.num_rows_per_expert.tolist() == [0] * 4
    rows = permute(torch.full((3, 8), float("nan")), plan)
    assert rows.tolist() == [[0.0] * 8]
    assert unpermute(rows, torch.ones(3, 2), plan).tolist() == [[0.0] * 8] * 3


@pytest.mark.parametrize(("experts", "alignment"), [(0, 1), (2, 0)])
def test_sizes_below_one_are_refused(experts: int, alignment: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        expert_major(choices(2, 1, 1), experts, alignment)


def plan_of(ids: torch.Tensor, experts: int, fixed: bool) -> Plan:
    return expert_major(ids, experts, 4, max_rows(*ids.shape, experts, 4) if fixed else 0)


@pytest.mark.parametrize("fixed", [False, True])
def test_values_and_gradients_equal_those_of_plain_torch(fixed: bool) -> None:
    ids, g = choices(11, 3, 4), torch.Generator().manual_seed(1)
    x = torch.randn(11, 8, generator=g, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(11, 3, generator=g, dtype=torch.float64, requires_grad=True)
    scales = torch.arange(1.0, 5.0, dtype=torch.float64)
    plan = plan_of(ids, 4, fixed)
    rows = permute(x, plan)
    of_place = scales.repeat_interleave(plan.num_rows_per_expert)
    y = torch.zeros_like(rows)
    y[: len(of_place)] = rows[: len(of_place)].square() * of_place[:, None]
    out = unpermute(y, weights, plan)
    chosen = torch.where(ids >= 0, scales[ids.clamp(min=0)], 0.0)
    want = (weights * chosen).sum(1, keepdim=True) * x.square()
    torch.testing.assert_close(out, want)
    grad = torch.randn(out.shape, generator=g, dtype=torch.float64)
    got = torch.autograd.grad(out, (x, weights), grad)
    for mine, right in zip(got, torch.autograd.grad(want, (x, weights), grad), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)  # sums are in FP32


def test_what_is_not_chosen_may_be_undefined() -> None:
    """As rows and weights are that were not received."""
    ids = torch.tensor([[1, -1], [-1, -1]])
    nan = float("nan")
    x = torch.tensor([[1.0] * 8, [nan] * 8], requires_grad=True)
    weights = torch.tensor([[2.0, nan], [nan, nan]], requires_grad=True)
    plan = expert_major(ids, 2, 2)
    out = unpermute(permute(x, plan), weights, plan)
    assert out[:, 0].tolist() == [2.0, 0.0]
    torch.autograd.backward(out.sum())
    assert x.grad is not None and weights.grad is not None
    assert x.grad[:, 0].tolist() == [2.0, 0.0]
    assert weights.grad.tolist() == [[8.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("places", [0, 40])
def test_the_operator_keeps_the_rules_of_torch(places: int) -> None:
    operator = torch.ops.deepep.expert_major.default
    torch.library.opcheck(operator, (choices(9, 2, 3), 3, 4, places))
