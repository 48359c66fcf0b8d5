"""The low-latency operators keep the rules of torch.library and compile; ExpertParallelDecode gives
what the same layer over all tokens in one piece gives."""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

import pytest
import torch
from deepep import fp8, ops
from deepep.buffer import Buffer
from deepep.nn import ExpertParallelDecode
from deepep.testing import run_ranks
from deepep.topology import expert_range
from torch import Tensor
from torch.nn import Module, Parameter

HIDDEN, INNER, TOPK, CAP = 160, 32, 2, 8
BACKENDS = ["eager", "aot_eager"]
if shutil.which("g++") and importlib.util.find_spec("setuptools"):  # what inductor needs
    BACKENDS.append("inductor")
TOLERANCE = {False: 2.0**-6, True: 2.0**-3}  # with FP8: 3 bits of fraction, and a sum of products


def new_buffer(group: Any = None, num_experts: int = 4, timeout: float = 60) -> Buffer:
    size = group.size() if group is not None else 1
    num_bytes = Buffer.get_low_latency_rdma_size_hint(CAP, HIDDEN, size, num_experts)
    return Buffer(group, 0, num_bytes, low_latency_mode=True, device="cpu", timeout=timeout)


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(seed)).bfloat16()


class Router(Module):
    """The largest K of a linear map; the same on all ranks."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.weight = Parameter(torch.randn(HIDDEN, num_experts, generator=g))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (x.float() @ self.weight).softmax(1).topk(TOPK, 1)
        return ids, weights


def matrices(num_experts: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    up = torch.randn((num_experts, HIDDEN, INNER), generator=g) * HIDDEN**-0.5
    down = torch.randn((num_experts, INNER, HIDDEN), generator=g) * INNER**-0.5
    return up, down


class Experts(Module):
    """Two matrices each, applied to all rows of an expert at once."""

    def __init__(self, local: range, num_experts: int) -> None:
        super().__init__()
        up, down = (each[local.start : local.stop] for each in matrices(num_experts))
        self.up, self.down = Parameter(up), Parameter(down)

    def forward(self, rows: Tensor, *scales_and_count: Tensor) -> Tensor:
        *scales, _ = scales_and_count
        x = rows.float()
        for scale in scales:
            x = x * scale[..., torch.arange(x.shape[2]) // fp8.GROUP_SIZE]
        return torch.bmm(torch.relu(torch.bmm(x, self.up)), self.down).bfloat16()


def layer_of(buffer: Buffer, num_experts: int, **options: Any) -> ExpertParallelDecode:
    local = expert_range(num_experts, buffer.group_size, buffer.rank)
    experts = Experts(local, num_experts)
    return ExpertParallelDecode(buffer, Router(num_experts), experts, num_experts, CAP, **options)


def dense(x: Tensor, num_experts: int) -> Tensor:
    """The layer without ranks, in FP32."""
    ids, weights = Router(num_experts)(x)
    up, down = matrices(num_experts)
    every = torch.einsum("tei,eih->teh", torch.einsum("th,ehi->tei", x.float(), up).relu(), down)
    chosen = every.gather(1, ids[..., None].expand(-1, -1, HIDDEN))
    return (chosen * weights[..., None]).sum(1)


def close(got: Tensor, want: Tensor, use_fp8: bool = False) -> None:
    limit = want.abs().max().item() * TOLERANCE[use_fp8] if want.numel() else 0.0
    torch.testing.assert_close(got.float(), want, rtol=0.0, atol=limit)


# ---- torch.library


@pytest.fixture
def routed() -> Any:
    """The name of a Buffer of one rank, rows, and every kind of id."""
    ids = torch.tensor([[0, 1], [2, 3], [-1, 1], [0, 3], [-1, -1]])
    with new_buffer() as buffer:
        yield ops.register(buffer), tokens(5), ids, torch.rand(5, 2)


@pytest.mark.parametrize(
    "cast", [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
)
def test_dispatch_keeps_the_rules_of_torch(routed: Any, cast: tuple[bool, ...]) -> None:
    name, x, ids, _ = routed
    operator = torch.ops.deepep.low_latency_dispatch.default
    # Rows that nobody sent are undefined, so two calls may differ: below they are compared.
    rules = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, (x, ids, name, CAP, 4, *cast), test_utils=rules)
    torch.library.opcheck(operator, (x, ids.int(), name, CAP, 4, *cast), test_utils=rules)


@pytest.mark.parametrize("use_logfmt", [False, True])
def test_combine_keeps_the_rules_of_torch(routed: Any, use_logfmt: bool) -> None:
    name, x, ids, weights = routed
    received = ops.low_latency_dispatch(name, x, ids, CAP, 4, use_fp8=False)
    *tensors, cap, experts = received.routing
    arguments = (received.x, ids, weights, *tensors, name, cap, experts, use_logfmt)
    torch.library.opcheck(torch.ops.deepep.low_latency_combine.default, arguments)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("cast", ["bf16", "fp8", "ue8m0"])
def test_they_do_what_the_methods_do(num_ranks: int, cast: str) -> None:
    options = {"use_fp8": cast != "bf16", "round_scale": cast == "ue8m0"}
    options["use_ue8m0"] = cast == "ue8m0"

    def work(group: Any) -> None:
        ids = torch.randint(-1, 8, (7, 3), generator=torch.Generator().manual_seed(group.rank()))
        x, weights = tokens(7, group.rank()), torch.rand(7, 3)
        with new_buffer(group, 8) as buffer:
            name = ops.register(buffer)
            got = ops.low_latency_dispatch(name, x, ids, CAP, 8, **options)
            want, count, handle, _, _ = buffer.low_latency_dispatch(x, ids, CAP, 8, **options)
            parts = want if isinstance(want, tuple) else (want, got.scales)
            assert (
                torch.equal(got.num_rows_per_expert, count)
                and got.scales.shape[2] == parts[1].shape[2]
            )
            for e, n in enumerate(count.tolist()):
                for mine, right in zip((got.x, got.scales), parts, strict=True):
                    assert mine.stride() == right.stride()
                    assert torch.equal(mine[e, :n].float(), right[e, :n].float())
            y = torch.randn(got.x.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
            out = ops.low_latency_combine(name, y, ids, weights, got.routing)
            assert torch.equal(out, buffer.low_latency_combine(y, ids, weights, handle)[0])

    run_ranks(num_ranks, work)


def test_they_have_no_gradient_and_know_only_registered_buffers(routed: Any) -> None:
    name, x, ids, weights = routed
    received = ops.low_latency_dispatch(name, x, ids, CAP, 4, use_fp8=False)
    y = received.x.clone().requires_grad_()
    out = ops.low_latency_combine(name, y, ids, weights, received.routing)
    with pytest.raises(RuntimeError, match="autograd"):
        out.sum().backward()
    with pytest.raises(KeyError, match=r"'other'.*deepep\.ops\.register"):
        ops.low_latency_dispatch("other", x, ids, CAP, 4)


# ---- The layer


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_layer_is_that_of_one_piece(num_ranks: int, use_fp8: bool) -> None:
    def work(group: Any) -> None:
        with new_buffer(group, 7) as buffer, torch.no_grad():
            layer = layer_of(buffer, 7, use_fp8=use_fp8)
            for step in range(3):
                x = tokens((5 + 3 * step + group.rank()) % (CAP + 1), 10 * step + group.rank())
                close(layer(x), dense(x, 7), use_fp8)
            x = tokens(6, group.rank())
            assert layer(x.view(3, 2, HIDDEN)).shape == (3, 2, HIDDEN)

    run_ranks(num_ranks, work)


def test_experts_may_write_where_peers_read() -> None:
    with new_buffer() as buffer, torch.no_grad():
        place, inner = buffer.empty(4, CAP, HIDDEN), Experts(range(4), 4)

        def experts(rows: Tensor, count: Tensor) -> Tensor:
            return place.copy_(inner(rows, count))

        layer = ExpertParallelDecode(buffer, Router(4), experts, 4, CAP)
        x = tokens(5)
        close(layer(x), dense(x, 4))


def test_a_rank_without_an_expert_and_too_many_tokens_are_refused() -> None:
    with new_buffer() as buffer:
        with pytest.raises(ValueError, match="num_experts=0"):
            layer_of(buffer, 0)
        with pytest.raises(ValueError, match=f"{CAP + 1} tokens.*is {CAP}"):
            layer_of(buffer, 4)(tokens(CAP + 1))


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_compiles_without_a_graph_break(backend: str, use_fp8: bool) -> None:
    torch._dynamo.reset()
    with new_buffer() as buffer, torch.no_grad():
        layer = layer_of(buffer, 4, use_fp8=use_fp8)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        for count in (5, CAP, 1):  # the second size makes the first dimension symbolic
            x = tokens(count, count)
            close(compiled(x), dense(x, 4), use_fp8)
            close(compiled(x), layer(x).float())
