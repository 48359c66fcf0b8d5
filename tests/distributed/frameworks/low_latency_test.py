"""The ways in which vLLM and SGLang call deep_ep's low-latency mode, from their public behaviour.

vLLM: receive hooks, handles of two micro-batches, the result written to its own tensor. SGLang:
halves that begin and end an operation, by hooks or by events, and a clean-up after normal mode.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deep_ep import Buffer
from deepep import fp8
from deepep.testing import run_processes, run_ranks
from torch import Tensor

from tests.distributed.cases import DEVICE
from tests.distributed.frameworks.dense import (
    HIDDEN,
    NUM_EXPERTS,
    Tokens,
    counts_of,
    factor,
    output,
    tokens_of,
)

CASTS = {
    "bf16": {"use_fp8": False},
    "fp8": {"use_fp8": True},
    "ue8m0": {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
}
MAX_TOKENS = 128


def make_buffer(group: Any, num_qps: int, **options: Any) -> Buffer:
    num_rdma_bytes = Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=MAX_TOKENS,
        hidden=HIDDEN,
        num_ranks=group.size(),
        num_experts=NUM_EXPERTS,
    )
    return Buffer(
        group=group,
        num_nvl_bytes=0,
        num_rdma_bytes=num_rdma_bytes,
        low_latency_mode=True,
        num_qps_per_rank=num_qps,
        allow_nvlink_for_low_latency_mode=True,
        device=DEVICE,
        **options,
    )


def run_experts(expert_x: Any, counts: Tensor, first_expert: int) -> Tensor:
    """Batched experts; what lies past the valid rows may be anything."""
    if isinstance(expert_x, tuple):
        data, scales = expert_x
        groups, num_scales = -(-HIDDEN // fp8.GROUP_SIZE), scales.shape[2]
        assert num_scales == (groups if scales.dtype == torch.float32 else -(-groups // 4))
        rows = [fp8.per_token_cast_back(part, s) for part, s in zip(data, scales, strict=True)]
        x = torch.stack(rows).float()
    else:
        x = expert_x.float()
    y = torch.full(x.shape, torch.nan, dtype=torch.bfloat16, device=x.device)
    for e, count in enumerate(counts.tolist()):
        number = factor(torch.tensor(first_expert + e, device=x.device))
        y[e, :count] = (number * x[e, :count]).bfloat16()
    return y


def same(result: Tensor, tokens: Tokens, cast: str) -> None:
    if cast == "fp8":  # 448 / amax is no power of two
        torch.testing.assert_close(result, output(tokens), rtol=0.1, atol=0.2)
    else:  # small integers are exact, also in FP8 with rounded scales
        assert torch.equal(result, output(tokens))


# ---- vLLM


class PrepareAndFinalize:
    """One layer's calls for two micro-batches."""

    def __init__(self, buffer: Buffer, cast: str) -> None:
        self.buffer, self.cast = buffer, cast
        self.handles: list[Any] = [None, None]

    def prepare(self, tokens: Tokens, batch: int) -> tuple[Callable[[], None], Callable[[], Any]]:
        expert_x, counts, self.handles[batch], _, hook = self.buffer.low_latency_dispatch(
            tokens.x,
            tokens.topk_idx,
            MAX_TOKENS,
            NUM_EXPERTS,
            async_finish=False,
            return_recv_hook=True,
            **CASTS[self.cast],
        )
        assert hook is not None
        return hook, lambda: (expert_x, counts)

    def finalize(
        self, result: Tensor, fused_output: Tensor, tokens: Tokens, batch: int, use_hook: bool
    ) -> Callable[[], None]:
        _, _, hook = self.buffer.low_latency_combine(
            fused_output,
            tokens.topk_idx,
            tokens.topk_weights,
            self.handles[batch],
            async_finish=False,
            zero_copy=False,
            return_recv_hook=use_hook,
            out=result,
        )
        return hook or (lambda: None)


def run_vllm(group: Any, cast: str, use_hook: bool) -> None:
    num_local = NUM_EXPERTS // group.size()
    buffer = make_buffer(group, num_local, explicitly_destroy=True)
    layer, first = PrepareAndFinalize(buffer, cast), group.rank() * num_local
    batches = [tokens_of(buffer.rank), tokens_of(buffer.rank + 10)]
    results = [torch.full_like(tokens.x, torch.nan) for tokens in batches]
    for _ in range(3):  # layers
        finish: Callable[[], None] = lambda: None  # noqa: E731
        for batch, tokens in enumerate(batches):
            hook, receive = layer.prepare(tokens, batch)
            finish()  # the other batch's combine
            hook()
            expert_x, counts = receive()
            if batch == 0:
                assert counts.tolist() == counts_of(first, num_local, group.size(), 1)
            y = run_experts(expert_x, counts, first)
            finish = layer.finalize(results[batch], y, tokens, batch, use_hook)
        finish()
        for result, tokens in zip(results, batches, strict=True):
            same(result, tokens, cast)
    buffer.destroy()


# ---- SGLang


class Dispatcher:
    """Dispatch and combine in two halves each."""

    def __init__(self, buffer: Buffer, cast: str, return_recv_hook: bool) -> None:
        self.buffer, self.cast, self.return_recv_hook = buffer, cast, return_recv_hook
        self.handle: Any = None

    def dispatch_a(self, tokens: Tokens) -> tuple[Any, ...]:
        received, masked_m, self.handle, event, hook = self.buffer.low_latency_dispatch(
            tokens.x,
            tokens.topk_idx.to(torch.int64),
            MAX_TOKENS,
            NUM_EXPERTS,
            async_finish=not self.return_recv_hook,
            return_recv_hook=self.return_recv_hook,
            **CASTS[self.cast],
        )
        return received, masked_m, event, hook

    def dispatch_b(self, received: Any, masked_m: Tensor, event: Any, hook: Any) -> Any:
        hook() if self.return_recv_hook else event.current_stream_wait()
        return received, masked_m

    def combine_a(self, x: Tensor, tokens: Tokens) -> tuple[Any, ...]:
        combined, event, hook = self.buffer.low_latency_combine(
            x=x,
            topk_idx=tokens.topk_idx.to(torch.int64),
            topk_weights=tokens.topk_weights,
            handle=self.handle,
            async_finish=not self.return_recv_hook,
            return_recv_hook=self.return_recv_hook,
        )
        self.handle = None
        return combined, event, hook

    def combine_b(self, combined: Tensor, event: Any, hook: Any) -> Tensor:
        hook() if self.return_recv_hook else event.current_stream_wait()
        return combined


def prefill(buffer: Buffer, tokens: Tokens) -> None:
    """Normal mode on the same Buffer."""
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(
        tokens.topk_idx, NUM_EXPERTS
    )
    rows, *_, handle, _ = buffer.dispatch(
        tokens.x,
        None,
        per_rank,
        per_node,
        in_rank,
        per_expert,
        tokens.topk_idx,
        tokens.topk_weights,
    )
    assert buffer.combine(rows, handle)[0].shape == tokens.x.shape


def run_sglang(group: Any, cast: str, return_recv_hook: bool) -> None:
    num_local = NUM_EXPERTS // group.size()
    buffer = make_buffer(group, num_local)
    dispatcher = Dispatcher(buffer, cast, return_recv_hook)
    tokens, first = tokens_of(buffer.rank), buffer.rank * num_local
    for _ in range(3):
        prefill(buffer, tokens)
        buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, NUM_EXPERTS)
        for _ in range(2):  # decode steps
            expert_x, masked_m = dispatcher.dispatch_b(*dispatcher.dispatch_a(tokens))
            y = run_experts(expert_x, masked_m, first)
            same(dispatcher.combine_b(*dispatcher.combine_a(y, tokens)), tokens, cast)
    buffer.destroy()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("run", [run_vllm, run_sglang])
def test_threads(num_ranks: int, cast: str, hooked: bool, run: Callable[..., None]) -> None:
    run_ranks(num_ranks, run, cast, hooked)


@pytest.mark.parametrize("run", [run_vllm, run_sglang])
def test_processes(run: Callable[..., None]) -> None:
    run_processes(4, run, "ue8m0", True)
