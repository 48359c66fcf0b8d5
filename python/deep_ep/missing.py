"""V1's low-latency methods, for as long as deepep.Buffer has none: each call says so.

A framework that only asks whether a method exists, or reads its signature, goes on. NotYet stands
behind deepep.Buffer in the order of bases, so that a method that appears there takes its place.
"""

from __future__ import annotations

from typing import Any, NoReturn

from deepep.config import v1_low_latency_size_hint
from deepep.errors import UnsupportedConfigError


def _refuse(method: str) -> NoReturn:
    raise UnsupportedConfigError(
        f"{method}: low-latency mode is not available in this version. Use get_dispatch_layout, "
        "dispatch and combine; with num_worst_tokens they need no wait of the host either."
    )


class NotYet:
    """Methods with V1's signatures that raise UnsupportedConfigError."""

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """V1's size, for code that passes it on as num_rdma_bytes. No such buffer is needed."""
        return v1_low_latency_size_hint(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        )

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        _refuse("clean_low_latency_buffer")

    def low_latency_dispatch(
        self,
        x: Any,
        topk_idx: Any,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Any = None,
        dispatch_wait_recv_cost_stats: Any = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> Any:
        _refuse("low_latency_dispatch")

    def low_latency_combine(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Any = None,
        combine_wait_recv_cost_stats: Any = None,
    ) -> Any:
        _refuse("low_latency_combine")

    def get_next_low_latency_combine_buffer(self, handle: Any) -> Any:
        _refuse("get_next_low_latency_combine_buffer")

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        _refuse("low_latency_update_mask_buffer")

    def low_latency_query_mask_buffer(self, mask_status: Any) -> None:
        _refuse("low_latency_query_mask_buffer")

    def low_latency_clean_mask_buffer(self) -> None:
        _refuse("low_latency_clean_mask_buffer")
