"""The way SGLang's normal dispatcher calls deep_ep, written from its public behaviour.

Sizes from both configurations, which may come from a file; FP8 rows with column-major scales, float
or packed; alignment of 128; halves that begin and end an operation, with events between them.
"""

import json
from typing import Any

import pytest
import torch
from deep_ep import Buffer, Config
from deepep import fp8
from deepep.testing import run_processes, run_ranks
from torch import Tensor

from tests.distributed.cases import DEVICE
from tests.distributed.frameworks.dense import (
    HIDDEN,
    NUM_EXPERTS,
    Tokens,
    counts_of,
    output,
    run_experts,
    tokens_of,
)

CONFIG_FILE = json.dumps(
    {
        name: {
            "num_sms": 24,
            "num_max_nvl_chunked_send_tokens": 8,
            "num_max_nvl_chunked_recv_tokens": 256,
            "num_max_rdma_chunked_send_tokens": 16,
            "num_max_rdma_chunked_recv_tokens": 128,
        }
        for name in ("normal_dispatch", "normal_combine")
    }
)


def make_buffer(group: Any, configs: dict[str, Config]) -> Buffer:
    hidden_bytes, size = HIDDEN * 2, group.size()
    num_nvl_bytes = num_rdma_bytes = 0
    for config in (
        configs.get("normal_dispatch") or Buffer.get_dispatch_config(size),
        configs.get("normal_combine") or Buffer.get_combine_config(size),
    ):
        num_nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, size), num_nvl_bytes)
        num_rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, size), num_rdma_bytes)
    return Buffer(
        group,
        num_nvl_bytes,
        num_rdma_bytes,
        low_latency_mode=False,
        num_qps_per_rank=24,
        allow_mnnvl=True,
        device=DEVICE,
    )


def quantised(x: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    data, scales = fp8.per_token_cast_to_fp8(x, round_scale=packed)
    scales = fp8.pack_ue8m0(scales) if packed else scales
    return data, scales.t().contiguous().t()


class Dispatcher:
    """Dispatch and combine in two halves each."""

    def __init__(self, buffer: Buffer, configs: dict[str, Config], async_finish: bool) -> None:
        self.buffer, self.configs, self.async_finish = buffer, configs, async_finish
        self.handle: Any = None

    def dispatch_a(self, tokens: Tokens, x: Any) -> tuple[Any, ...]:
        previous_event = Buffer.capture() if self.async_finish else None
        return x, tokens.topk_idx.to(torch.int64), tokens.topk_weights, previous_event

    def dispatch_b(self, x: Any, ids: Tensor, weights: Tensor, previous_event: Any) -> Any:
        on_comm_stream = previous_event is not None and self.async_finish
        per_rank, per_rdma_rank, per_expert, in_rank, previous_event = (
            self.buffer.get_dispatch_layout(
                ids,
                NUM_EXPERTS,
                previous_event=previous_event,
                async_finish=self.async_finish,
                allocate_on_comm_stream=previous_event is not None,
            )
        )
        recv_x, recv_ids, recv_weights, counts, self.handle, event = self.buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=previous_event,
            async_finish=self.async_finish,
            allocate_on_comm_stream=on_comm_stream,
            expert_alignment=128,
            config=self.configs.get("normal_dispatch"),
        )
        if self.async_finish:
            event.current_stream_wait()
        return recv_x, recv_ids, recv_weights, counts

    def combine_a(self, y: Tensor) -> tuple[Any, ...]:
        return y, Buffer.capture() if self.async_finish else None

    def combine_b(self, y: Tensor, previous_event: Any) -> Tensor:
        combined, _, event = self.buffer.combine(
            y,
            self.handle,
            async_finish=self.async_finish,
            previous_event=previous_event,
            allocate_on_comm_stream=previous_event is not None,
            config=self.configs.get("normal_combine"),
        )
        if self.async_finish:
            event.current_stream_wait()
        self.handle = None
        return combined


def run(group: Any, payload: str, async_finish: bool, from_file: bool) -> None:
    read = json.loads(CONFIG_FILE) if from_file else {}
    configs = {name: Config(**fields) for name, fields in read.items()}
    dispatcher = Dispatcher(make_buffer(group, configs), configs, async_finish)
    mine = tokens_of(group.rank())
    num_local = NUM_EXPERTS // group.size()
    first = group.rank() * num_local
    for _ in range(2):
        x = mine.x if payload == "bf16" else quantised(mine.x, payload == "packed")
        rows, ids, weights, counts = dispatcher.dispatch_b(*dispatcher.dispatch_a(mine, x))
        assert counts == counts_of(first, num_local, group.size(), 128)
        if isinstance(rows, tuple):
            data, scales = rows
            assert data.dtype == torch.float8_e4m3fn and len(scales) == len(data)
            if payload == "packed":
                scales = fp8.unpack_ue8m0(scales, HIDDEN // 128)
            rows = fp8.per_token_cast_back(data, scales).bfloat16()
        y = run_experts(rows, ids, weights, first)
        combined = dispatcher.combine_b(*dispatcher.combine_a(y))
        if payload == "float":
            torch.testing.assert_close(combined, output(mine), rtol=0.1, atol=0.1)
        else:  # BF16 and powers of two hold small integers exactly
            assert torch.equal(combined, output(mine))
    dispatcher.buffer.destroy()


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("payload", ["bf16", "float", "packed"])
@pytest.mark.parametrize("async_finish", [False, True])
def test_threads(num_ranks: int, payload: str, async_finish: bool) -> None:
    run_ranks(num_ranks, run, payload, async_finish, payload == "bf16")


def test_processes() -> None:
    run_processes(4, run, "float", True, True)
