"""The way vLLM's high-throughput prepare and finalize call deep_ep, from their public behaviour.

A Buffer of a fixed size, a configuration only where V1 has one, block-scaled FP8 or BF16 rows, ids
mapped to global ones for its kernels, and a combine without weights and bias.
"""

from collections.abc import Callable
from typing import Any

import deep_ep
import pytest
import torch
from deepep import fp8
from deepep.testing import run_processes, run_ranks
from torch import Tensor

from tests.distributed.cases import DEVICE
from tests.distributed.frameworks.dense import (
    NUM_EXPERTS,
    Tokens,
    counts_of,
    output,
    run_experts,
    tokens_of,
)

RANKS_WITH_CONFIG = [2, 4, 8, 16, 24, 32, 64, 128, 144, 160]


class PrepareAndFinalize:
    """One layer's calls."""

    def __init__(self, buffer: deep_ep.Buffer, asynchronous: bool) -> None:
        self.buffer = buffer
        self.asynchronous = asynchronous
        self.num_dispatchers = buffer.group_size
        self.rank_expert_offset = buffer.rank * (NUM_EXPERTS // buffer.group_size)
        self.handles: list[Any] = [None, None]  # of two micro-batches

    def _config(self, get: Callable[[int], deep_ep.Config]) -> deep_ep.Config | None:
        return get(self.num_dispatchers) if self.num_dispatchers in RANKS_WITH_CONFIG else None

    def prepare(self, tokens: Tokens, block_scaled: bool, batch: int) -> Callable[[], Any]:
        previous_event = self.buffer.capture() if self.asynchronous else None
        (
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            num_tokens_per_expert,
            is_token_in_rank,
            event,
        ) = self.buffer.get_dispatch_layout(
            topk_idx=tokens.topk_idx,
            num_experts=NUM_EXPERTS,
            previous_event=previous_event,
            async_finish=False,
            allocate_on_comm_stream=False,
        )
        token_data = fp8.per_token_cast_to_fp8(tokens.x) if block_scaled else tokens.x
        token_data, ids, weights, counts, self.handles[batch], event = self.buffer.dispatch(
            x=token_data,
            handle=None,
            num_tokens_per_rank=num_tokens_per_rank,
            num_tokens_per_rdma_rank=num_tokens_per_rdma_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            topk_idx=tokens.topk_idx,
            topk_weights=tokens.topk_weights,
            expert_alignment=1,
            config=self._config(deep_ep.Buffer.get_dispatch_config),
            previous_event=previous_event,
            async_finish=self.asynchronous,
            allocate_on_comm_stream=False,
        )
        return lambda: self._receive(token_data, ids, weights, counts, event)

    def _receive(self, token_data: Any, ids: Any, weights: Any, counts: Any, event: Any) -> Any:
        if event.event is not None:
            event.current_stream_wait()
        rows, scales = token_data if isinstance(token_data, tuple) else (token_data, None)
        # Kernels want global ids, and for no expert one of another rank's.
        foreign = NUM_EXPERTS - 1 if self.rank_expert_offset == 0 else 0
        ids = torch.where(ids == -1, foreign, ids + self.rank_expert_offset)
        per_expert = torch.tensor(counts, dtype=torch.int32, device=rows.device)
        return rows, scales, per_expert, counts, ids, weights

    def finalize(self, output: Tensor, expert_output: Tensor, batch: int) -> Callable[[], None]:
        previous_event = self.buffer.capture() if self.asynchronous else None
        combined_x, _, event = self.buffer.combine(
            x=expert_output,
            handle=self.handles[batch],
            topk_weights=None,
            config=self._config(deep_ep.Buffer.get_combine_config),
            previous_event=previous_event,
            async_finish=self.asynchronous,
            allocate_on_comm_stream=False,
        )

        def receive() -> None:
            if event.event is not None:
                event.current_stream_wait()
            output.copy_(combined_x, non_blocking=True)

        return receive


def run(group: Any, block_scaled: bool, asynchronous: bool) -> None:
    buffer = deep_ep.Buffer(
        group=group,
        num_nvl_bytes=1024 * 1024 * 1024,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=1,
        explicitly_destroy=True,
        device=DEVICE,
    )
    buffer.set_num_sms(20)
    layer = PrepareAndFinalize(buffer, asynchronous)
    num_local = NUM_EXPERTS // group.size()
    first = buffer.rank * num_local
    batches = [tokens_of(buffer.rank), tokens_of(buffer.rank + 10)]
    pending = [layer.prepare(tokens, block_scaled, i) for i, tokens in enumerate(batches)]
    for batch, tokens in enumerate(batches):
        rows, scales, per_expert, counts, ids, weights = pending[batch]()
        if scales is not None:
            rows = fp8.per_token_cast_back(rows, scales).bfloat16()
        if batch == 0:
            assert counts == counts_of(first, num_local, group.size(), 1)
        assert per_expert.tolist() == counts
        mine = (ids >= first) & (ids < first + num_local)
        if group.size() > 1:
            assert [int((ids == first + e).sum()) for e in range(num_local)] == counts
        else:  # a single rank has no other's expert to name; the weight is 0
            mine &= weights > 0
        y = run_experts(rows, torch.where(mine, ids - first, -1), weights, first)
        result = torch.empty_like(tokens.x)
        layer.finalize(result, y, batch)()
        if block_scaled:
            torch.testing.assert_close(result, output(tokens), rtol=0.1, atol=0.1)
        else:
            assert torch.equal(result, output(tokens))
    buffer.destroy()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("block_scaled", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_threads(num_ranks: int, block_scaled: bool, asynchronous: bool) -> None:
    run_ranks(num_ranks, run, block_scaled, asynchronous)


def test_processes() -> None:
    run_processes(4, run, True, True)
