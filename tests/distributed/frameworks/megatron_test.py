"""The way Megatron-LM's fused all-to-all calls deep_ep, written from its public behaviour.

A Buffer for the process, made again when it is too small; dispatch and combine as two functions of
autograd, each the other's backward along the same handle; events between all of them.
"""

from typing import Any

import pytest
import torch
from deep_ep import Buffer
from deep_ep.utils import EventHandle, EventOverlap
from deepep import BufferStateError
from deepep.testing import run_processes, run_ranks
from torch import Tensor

from tests.distributed.cases import DEVICE
from tests.distributed.frameworks.dense import (
    NUM_EXPERTS,
    counts_of,
    factor,
    output,
    run_experts,
    tokens_of,
)


class Cache:
    """One Buffer for the group, as large as any call has asked for."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.buffer: Buffer | None = None

    def get(self, hidden_bytes: int) -> Buffer:
        num_nvl_bytes = num_rdma_bytes = 0
        size = self.group.size()
        for config in (Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)):
            nvl = config.get_nvl_buffer_size_hint(hidden_bytes, size)
            num_nvl_bytes = max(nvl, num_nvl_bytes)
            rdma = config.get_rdma_buffer_size_hint(hidden_bytes, size)
            num_rdma_bytes = max(rdma, num_rdma_bytes)
        buffer = self.buffer
        if (
            buffer is None
            or buffer.group != self.group
            or buffer.num_nvl_bytes < num_nvl_bytes
            or buffer.num_rdma_bytes < num_rdma_bytes
        ):
            self.buffer = buffer = Buffer(self.group, num_nvl_bytes, num_rdma_bytes, device=DEVICE)
        return buffer


def hidden_bytes(x: Tensor) -> int:
    return x.size(1) * max(x.element_size(), 2)


class FusedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        token_indices: Tensor,
        token_probs: Tensor,
        cache: Cache,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> Any:
        previous_event = EventOverlap(EventHandle()) if async_finish else None
        events: Any = {
            "async_finish": async_finish,
            "allocate_on_comm_stream": allocate_on_comm_stream,
        }
        buffer = cache.get(hidden_bytes(x))
        (
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            num_tokens_per_expert,
            is_token_in_rank,
            event,
        ) = buffer.get_dispatch_layout(
            token_indices, NUM_EXPERTS, previous_event=previous_event, **events
        )
        recv_x, recv_indices, recv_probs, counts, handle, after = buffer.dispatch(
            x,
            topk_idx=token_indices,
            topk_weights=token_probs,
            num_tokens_per_rank=num_tokens_per_rank,
            num_tokens_per_rdma_rank=num_tokens_per_rdma_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            previous_event=event,
            **events,
        )
        if async_finish:
            after.current_stream_wait()
        ctx.cache, ctx.handle, ctx.events = cache, handle, events
        return recv_x, recv_indices, recv_probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, _indices: Any, grad_probs: Tensor, *_: Any) -> Any:
        buffer = ctx.cache.get(hidden_bytes(grad_output))
        asynchronous = ctx.events["async_finish"]
        grad_x, grad_token_probs, after = buffer.combine(
            grad_output.contiguous(),
            ctx.handle,
            topk_weights=grad_probs.float(),
            previous_event=EventOverlap(EventHandle()) if asynchronous else None,
            **ctx.events,
        )
        if asynchronous:
            after.current_stream_wait()
        return grad_x, None, grad_token_probs, None, None, None


class FusedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cache: Cache, handle: Any, events: Any) -> Any:
        asynchronous = events["async_finish"]
        buffer = cache.get(hidden_bytes(x))
        combined_x, _, after = buffer.combine(
            x,
            handle=handle,
            previous_event=EventOverlap(EventHandle()) if asynchronous else None,
            **events,
        )
        if asynchronous:
            after.current_stream_wait()
        ctx.cache, ctx.handle, ctx.events = cache, handle, events
        return combined_x, None

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, _: Any) -> Any:
        asynchronous = ctx.events["async_finish"]
        buffer = ctx.cache.get(hidden_bytes(grad_output))
        grad_x, _, _, _, _, after = buffer.dispatch(
            grad_output.contiguous(),
            handle=ctx.handle,
            previous_event=EventOverlap(EventHandle()) if asynchronous else None,
            **ctx.events,
        )
        if asynchronous:
            after.current_stream_wait()
        return grad_x, None, None, None


def layers(group: Any, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    """Two layers, forward and backward, three steps with one Buffer."""
    cache, events = Cache(group), (async_finish, allocate_on_comm_stream)
    named = {"async_finish": async_finish, "allocate_on_comm_stream": allocate_on_comm_stream}
    mine = tokens_of(group.rank())
    num_local = NUM_EXPERTS // group.size()
    first = group.rank() * num_local
    dispatch: Any = FusedDispatch.apply
    combine: Any = FusedCombine.apply
    for _ in range(3):
        x = mine.x.clone().requires_grad_()
        probs = mine.topk_weights.clone().requires_grad_()
        rows, ids, row_probs, counts, handle = dispatch(x, mine.topk_idx, probs, cache, *events)
        assert counts.tolist() == counts_of(first, num_local, group.size(), 1)
        y, _ = combine(run_experts(rows, ids, row_probs, first), cache, handle, named)
        assert torch.equal(y, output(mine))
        torch.autograd.backward(y.float().sum())
        scale = (mine.topk_weights * factor(mine.topk_idx)).sum(1, keepdim=True)
        assert x.grad is not None and probs.grad is not None
        assert torch.equal(x.grad, scale.expand_as(x).bfloat16())
        want = factor(mine.topk_idx) * mine.x.float().sum(1, keepdim=True)
        assert torch.equal(probs.grad, want)
    assert cache.buffer is not None
    cache.buffer.destroy()


EVENTS = [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("async_finish", "allocate_on_comm_stream"), EVENTS)
def test_threads(num_ranks: int, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    run_ranks(num_ranks, layers, async_finish, allocate_on_comm_stream)


def test_processes() -> None:
    run_processes(4, layers, True, True)


def test_a_larger_hidden_size_makes_a_new_buffer_and_old_handles_keep_their_own() -> None:
    def work(group: Any) -> None:
        cache = Cache(group)
        small = cache.get(512)
        assert cache.get(256) is small
        mine = tokens_of(group.rank())
        per_rank, _, per_expert, in_rank, _ = small.get_dispatch_layout(mine.topk_idx, NUM_EXPERTS)
        rows, *_, handle, _ = small.dispatch(mine.x, None, per_rank, None, in_rank, per_expert)
        assert isinstance(rows, Tensor)
        large = cache.get(1024)
        assert large is not small and large.num_nvl_bytes > small.num_nvl_bytes
        # V1's handles serve any Buffer; these name the one that they belong to.
        with pytest.raises(BufferStateError):
            large.combine(rows, handle)
        out, _, _ = small.combine(rows, handle)
        copies = in_rank.sum(1, keepdim=True)  # small integers, so sums are exact
        assert torch.equal(out, (mine.x.float() * copies).bfloat16())

    run_ranks(2, work)
