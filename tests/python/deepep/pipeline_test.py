"""ExpertParallel.forward_many: the bits of one batch after the other, in an order that overlaps.

Streams do not exist on the CPU; what is looked at is the order in which operations are begun and
waited for.
"""

from typing import Any

import pytest
import torch
from deepep import events, pipeline
from deepep.buffer import Buffer
from deepep.nn import ExpertParallel
from deepep.testing import run_ranks
from torch import Tensor
from torch.nn import Module, Parameter

HIDDEN, EXPERTS, TOPK = 32, 8, 3


class Router(Module):
    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.weight = Parameter(torch.randn(HIDDEN, EXPERTS, generator=g) * HIDDEN**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (x.float() @ self.weight).softmax(1).topk(TOPK, 1)
        return ids, weights


class Experts(Module):
    """A factor for each expert and element."""

    def __init__(self, local: range) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(2)
        self.scale = Parameter(torch.randn(EXPERTS, HIDDEN, generator=g)[local.start : local.stop])

    def forward(self, rows: Tensor, num_rows_per_expert: Tensor) -> Tensor:
        places = torch.arange(rows.shape[0])
        expert = torch.searchsorted(num_rows_per_expert.cumsum(0), places, right=True)
        scale = self.scale[expert.clamp(max=len(self.scale) - 1)]
        return (rows.float() * scale).square().to(rows.dtype)


def batches(rank: int, count: int) -> list[Tensor]:
    """Of different sizes; rank 1 has no token in the first."""
    g = torch.Generator().manual_seed(10 + rank)
    sizes = [0 if (rank, index) == (1, 0) else 5 + 3 * rank + 2 * index for index in range(count)]
    return [torch.randn(size, HIDDEN, generator=g).bfloat16().requires_grad_() for size in sizes]


def layer_of(buffer: Buffer, **options: int) -> ExpertParallel:
    made = ExpertParallel(buffer, Router(), Experts(range(0)), EXPERTS, **options)
    made.experts = Experts(made.local_experts)
    return made


def results(layer: ExpertParallel, x: list[Tensor], outs: list[Tensor]) -> list[Tensor]:
    """Outputs, then the gradients of all inputs and parameters."""
    loss = sum((out.float() * (index + 1)).square().sum() for index, out in enumerate(outs))
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, [*x, *layer.parameters()])
    return [*(out.detach() for out in outs), *grads]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"expert_alignment": 8, "num_worst_tokens": 90}])
def test_results_and_gradients_are_those_of_one_after_the_other(
    num_ranks: int, count: int, options: dict[str, int]
) -> None:
    def work(group: Any) -> None:
        with Buffer(group, device="cpu", timeout=60) as buffer:
            layer, x = layer_of(buffer, **options), batches(buffer.rank, count)
            want = results(layer, x, [layer(each) for each in x])
            got = results(layer, x, layer.forward_many(x))
            assert len(got) == 2 * count + 2
            for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
                assert torch.equal(ours, theirs), f"result {index}"

    run_ranks(num_ranks, work)


def test_no_batch_is_no_work_and_shapes_are_kept() -> None:
    with Buffer(device="cpu") as buffer, torch.no_grad():
        layer = layer_of(buffer)
        assert layer.forward_many([]) == []
        x = torch.randn(2, 3, HIDDEN).bfloat16()
        (out,) = layer.forward_many([x])
        assert torch.equal(out, layer(x)) and out.shape == x.shape


def recorded(buffer: Buffer, layer: ExpertParallel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens: operations begun, waits, and experts."""
    seen: list[str] = []
    for name in ("dispatch", "combine"):
        method = getattr(buffer, name)

        def begun(*args: Any, name: str = name, method: Any = method, **others: Any) -> Any:
            assert others["async_finish"]
            seen.append(name)
            return method(*args, **others)

        monkeypatch.setattr(buffer, name, begun)
    wait, forward = events.EventOverlap.current_stream_wait, layer.experts.forward

    def waited(self: Any, release_handle: bool = False) -> None:
        seen.append("wait")
        wait(self, release_handle)

    def computed(*args: Any) -> Any:
        seen.append("experts")
        return forward(*args)

    monkeypatch.setattr(events.EventOverlap, "current_stream_wait", waited)
    monkeypatch.setattr(layer.experts, "forward", computed)
    layer.experts.register_full_backward_hook(lambda *_: seen.append("experts back"))
    return seen


def test_rows_travel_while_experts_work_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Buffer(device="cpu") as buffer:
        layer, x = layer_of(buffer), batches(0, 2)
        seen = recorded(buffer, layer, monkeypatch)
        outs = layer.forward_many(x)
        assert " ".join(seen) == (
            "dispatch dispatch wait experts combine wait experts combine wait wait"
        )
        seen.clear()
        torch.cat(outs).float().sum().backward()
        # The gradient of a combine is a dispatch, and that of a dispatch a combine.
        assert " ".join(seen) == (
            "dispatch dispatch wait experts back combine wait experts back combine wait wait"
        )


def test_backward_can_be_repeated() -> None:
    with Buffer(device="cpu") as buffer:
        layer, x = layer_of(buffer), batches(0, 2)
        loss = torch.cat(layer.forward_many(x)).float().sum()
        once = torch.autograd.grad(loss, x, retain_graph=True)
        again = torch.autograd.grad(loss, x)
        assert all(map(torch.equal, once, again))


def test_halves_are_free_to_stand_apart() -> None:
    with Buffer(device="cpu") as buffer:
        (x,), ids, weights = (
            batches(0, 1),
            torch.tensor([[0], [1], [0], [-1], [1]]),
            torch.ones(5, 1),
        )
        begun = pipeline.begin_dispatch(buffer, x, ids, weights, 2, 0)
        rows = pipeline.end_dispatch(begun)
        assert rows.x.shape == (4, HIDDEN) and not rows.topk_idx.requires_grad
        out = pipeline.end_combine(pipeline.begin_combine(buffer, rows.x, rows.handle))
        assert torch.equal(out[:3], x[:3]) and not out[3].any()
