"""The operators keep the rules of torch.library, compile without a graph break, and recompute.

Backends "eager" and "aot_eager" need no compiler; "inductor" runs where it can build.
"""

import functools
import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepep import autograd, ops
from deepep.buffer import Buffer
from deepep.nn import ExpertParallel
from deepep.testing import run_processes, run_ranks
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils import checkpoint

HIDDEN, TOPK = 32, 2
BACKENDS = ["eager", "aot_eager"]
if shutil.which("g++") and importlib.util.find_spec("setuptools"):  # what inductor needs
    BACKENDS.append("inductor")


class Router(Module):
    """The largest K of a linear map."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.weight = Parameter(torch.randn(HIDDEN, num_experts, generator=g))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (x.float() @ self.weight).softmax(1).topk(TOPK, 1)
        return ids, weights


class Experts(Module):
    """One vector of factors each."""

    def __init__(self, local: range) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(2)
        self.scale = Parameter(torch.randn(64, HIDDEN, generator=g)[local.start : local.stop])

    def forward(self, rows: Tensor, num_rows_per_expert: Tensor) -> Tensor:
        places = torch.arange(rows.shape[0], device=rows.device)
        expert = torch.searchsorted(num_rows_per_expert.cumsum(0), places, right=True)
        return (rows.float() * self.scale[expert.clamp(max=len(self.scale) - 1)]).bfloat16()


def layer_of(buffer: Buffer, num_experts: int, **options: int) -> ExpertParallel:
    per_rank = num_experts // buffer.group_size
    local = range(buffer.rank * per_rank, (buffer.rank + 1) * per_rank)
    return ExpertParallel(buffer, Router(num_experts), Experts(local), num_experts, **options)


def tokens(count: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, HIDDEN, generator=g).bfloat16().requires_grad_()


def step(layer: Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and of all parameters."""
    wanted = [x, *layer.parameters()]
    out = call(x)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), wanted)]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    """Equal but for BF16 roundings between operations, which a compiler may leave out."""
    for mine, right in zip(got, want, strict=True):
        limit = right.abs().max().item() * 2**-6 if right.numel() else 0.0
        torch.testing.assert_close(mine, right, rtol=0.0, atol=limit)


# ---- torch.library


@pytest.fixture
def routed() -> Any:
    """A Buffer of one rank, its name, and arguments of a dispatch with every kind of id."""
    ids = torch.tensor([[0, 1], [2, 3], [-1, 1], [0, 3], [-1, -1]])
    with Buffer(device="cpu") as buffer:
        yield ops.register(buffer), tokens(5), ids, torch.rand(5, 2, requires_grad=True)


@pytest.mark.parametrize("worst", [0, 4])  # 4 rows arrive: all of the output is defined
def test_dispatch_keeps_the_rules_of_torch(routed: Any, worst: int) -> None:
    name, x, ids, weights = routed
    operator = torch.ops.deepep.dispatch.default
    torch.library.opcheck(operator, (x, ids, weights, name, 4, worst))
    torch.library.opcheck(operator, (x, ids.int(), weights, name, 4, worst))


def test_the_other_operators_keep_the_rules_of_torch(routed: Any) -> None:
    name, x, ids, weights = routed
    received = ops.dispatch(name, x, ids, weights, 4)
    rows = received.x.detach().requires_grad_()
    routing = (*received.routing, name)
    operators = torch.ops.deepep
    torch.library.opcheck(operators.combine.default, (rows, *routing))
    torch.library.opcheck(operators.dispatch_again.default, (x.detach(), *routing))
    recv_weights = received.topk_weights.detach()
    torch.library.opcheck(
        operators.combine_weights.default, (rows.detach(), recv_weights, *routing)
    )


@pytest.mark.parametrize("num_ranks, per_node", [(1, None), (2, None), (4, None), (2, 1), (4, 2)])
def test_they_do_what_the_eager_functions_do(num_ranks: int, per_node: int | None) -> None:
    def work(group: Any) -> None:
        ids = torch.randint(-1, 8, (9, 3), generator=torch.Generator().manual_seed(group.rank()))
        with Buffer(group, device="cpu", timeout=20, ranks_per_node=per_node) as buffer:
            results = []
            for module, key in ((autograd, buffer), (ops, ops.register(buffer))):
                x = tokens(9, group.rank())
                weights = torch.full(ids.shape, 0.5, requires_grad=True)
                received: Any = module.dispatch(key, x, ids, weights, 8)
                y = (received.x * received.topk_weights.sum(1, keepdim=True)).bfloat16()
                out = module.combine(key, y, received[4])
                loss = out.float().square().sum()
                grads = torch.autograd.grad(loss, (x, weights))
                results.append([received.x, received.topk_idx, out, *grads])
            for mine, right in zip(*results, strict=True):
                assert torch.equal(mine, right)

    run_ranks(num_ranks, work)


def test_counts_are_exact_and_an_unknown_name_is_refused(routed: Any) -> None:
    name, x, ids, weights = routed
    assert ops.dispatch(name, x, ids, weights, 4).num_tokens_per_expert.tolist() == [2, 2, 1, 2]
    with pytest.raises(KeyError, match=r"'other'.*deepep\.ops\.register"):
        ops.dispatch("other", x, ids, weights, 4)


# ---- torch.compile


@pytest.mark.parametrize(
    ("backend", "worst"), [*((backend, 0) for backend in BACKENDS), ("aot_eager", 20)]
)
def test_a_layer_compiles_without_a_graph_break(backend: str, worst: int) -> None:
    torch._dynamo.reset()
    with Buffer(device="cpu") as buffer:
        layer = layer_of(buffer, 4, expert_alignment=8, num_worst_tokens=worst)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        for count in (13, 7, 20):  # the second size makes the first dimension symbolic
            x = tokens(count, count)
            same(step(layer, compiled, x), step(layer, layer, x))


def test_another_number_of_received_rows_needs_no_new_graph() -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    with Buffer(device="cpu") as buffer:
        name = ops.register(buffer)

        @functools.partial(torch.compile, fullgraph=True, backend=backend)
        def rows(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return ops.dispatch(name, x, ids, weights, 2).x * 2

        for received in (4, 1, 0, 3):
            ids = torch.where(torch.arange(4) < received, 0, -1)[:, None]
            assert len(rows(tokens(4).detach(), ids, torch.ones(4, 1))) == received
    assert len(graphs) == 1


def compiled_on_a_rank(group: Any, backend: str, per_node: int | None, worst: int) -> None:
    with Buffer(group, device="cpu", timeout=120, ranks_per_node=per_node) as buffer:
        layer = layer_of(buffer, 8, expert_alignment=4, num_worst_tokens=worst)
        compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
        for count in (5 + 6 * buffer.rank, 9 - 9 * buffer.rank):
            x = tokens(count, buffer.rank)
            same(step(layer, compiled, x), step(layer, layer, x))


@pytest.mark.parametrize("per_node, worst", [(None, 0), (1, 0), (1, 40)])
def test_a_compiled_layer_on_two_ranks_of_which_one_may_have_no_tokens(
    per_node: int | None, worst: int
) -> None:
    run_processes(2, compiled_on_a_rank, "aot_eager", per_node, worst, timeout=240)


# ---- Activation checkpointing


def calls(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations of a Buffer in the order in which they are called."""
    names: list[str] = []
    for name in ("dispatch", "combine"):
        method = getattr(buffer, name)

        def counted(*args: Any, name: str = name, method: Any = method, **others: Any) -> Any:
            names.append(name + (" again" if others.get("handle") is not None else ""))
            return method(*args, **others)

        monkeypatch.setattr(buffer, name, counted)
    return names


def test_checkpointing_repeats_the_dispatch_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    with Buffer(device="cpu") as buffer:
        layer, x = layer_of(buffer, 4, expert_alignment=8), tokens(11)
        want = step(layer, layer, x)
        names = calls(buffer, monkeypatch)

        def repeated(x: Tensor) -> Tensor:
            return checkpoint.checkpoint(layer, x, use_reentrant=False)

        same(step(layer, repeated, x), want)
    # Forward, its repetition up to what combine saved, backward.
    assert names == ["dispatch", "combine"] * 2 + ["dispatch again", "combine"]


def test_results_of_dispatch_can_be_kept_while_the_rest_is_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = [torch.ops.deepep.dispatch.default, torch.ops.deepep.combine.default]
    with Buffer(device="cpu") as buffer:
        layer, x = layer_of(buffer, 4, expert_alignment=8), tokens(11)
        want = step(layer, layer, x)
        names = calls(buffer, monkeypatch)

        def repeated(x: Tensor) -> Tensor:
            contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, kept)
            return checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

        same(step(layer, repeated, x), want)
    assert names == ["dispatch", "combine", "dispatch again", "combine"]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_checkpointing_among_ranks(num_ranks: int) -> None:
    def work(group: Any) -> None:
        with Buffer(group, device="cpu", timeout=60) as buffer:
            layer = layer_of(buffer, 8)
            x = tokens(3 * buffer.rank, buffer.rank)  # rank 0 has none

            def repeated(x: Tensor) -> Tensor:
                return checkpoint.checkpoint(layer, x, use_reentrant=False)

            same(step(layer, repeated, x), step(layer, layer, x))

    run_ranks(num_ranks, work)


def test_checkpointing_of_the_eager_functions() -> None:
    def work(group: Any) -> None:
        ids, weights = torch.tensor([[0], [1], [0]]), torch.ones(3, 1)
        with Buffer(group, device="cpu", timeout=60) as buffer:

            def moe(x: Tensor) -> Tensor:
                received = autograd.dispatch(buffer, x, ids, weights, 2)
                return autograd.combine(buffer, received.x.square(), received.handle)

            x = tokens(3, group.rank())
            grads = [
                torch.autograd.grad(call(x).float().square().sum(), x)[0]
                for call in (moe, lambda x: checkpoint.checkpoint(moe, x, use_reentrant=False))
            ]
            assert torch.equal(*grads)

    run_ranks(2, work)
