"""High-throughput mode of Buffer: layout, dispatch and combine with V1's signatures.

Letters in docstrings as in deepep.buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepep import _runtime, arguments, internode, routing
from deepep.arguments import Payload, tensors_of
from deepep.config import Config
from deepep.events import EventOverlap
from deepep.handles import require_handle
from deepep.internode_handle import AnyHandle, InternodeHandle, require_internode_handle
from deepep.part import BufferPart

Layout = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]
Dispatched = tuple[
    Payload,
    torch.Tensor | None,
    torch.Tensor | None,
    list[int] | None,
    AnyHandle,
    EventOverlap,
]
Combined = tuple[torch.Tensor, torch.Tensor | None, EventOverlap]


class ThroughputMode(BufferPart):
    """The part of Buffer that prefill and training use."""

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Layout:
        """Counts who needs this rank's tokens.

        Args:
            topk_idx: int64 or int32 [T, K]; experts of each token, -1 for none.
            num_experts: E, of the whole group. Experts are split contiguously; where they do not
                divide, the first E mod R ranks hold one more.

        Returns:
            num_tokens_per_rank int32 [R]; num_tokens_per_rdma_rank int32 [N], None where the group
            is one node; num_tokens_per_expert int32 [E]; is_token_in_rank bool [T, R]; the event.

        Raises:
            ValueError, TypeError: a wrong shape or dtype, or (cpu only) an id that is no expert.
        """
        self._engine.check_usable()
        arguments.check_event_arguments(previous_event, async_finish, allocate_on_comm_stream)
        topk = arguments.check_topk(topk_idx, None, None, self._engine.device)
        self._check_experts(num_experts)
        num_tokens = topk.ids.shape[0]
        engine = self._engine
        engine.check_capture(host_waits=False)
        engine.begin("layout", previous_event, async_finish)
        if engine.nodes.num_nodes > 1:
            counts = internode.layout(
                engine, topk, num_experts, engine.num_blocks(None, 4 * self.num_sms)
            )
            return (*counts, engine.end(async_finish, (topk.ids, *counts)))
        made = engine.local_piece(
            ((self.group_size,), torch.int32),
            ((num_experts,), torch.int32),
            ((num_tokens, self.group_size), torch.bool),
        )
        at_ranks, at_experts, at_flags = made.addresses
        engine.layout(
            _runtime.LayoutArgs(
                num_blocks=engine.num_blocks(None, 4 * self.num_sms),
                stream=engine.stream,
                num_ranks=self.group_size,
                num_experts=num_experts,
                num_tokens=num_tokens,
                num_topk=topk.num_topk,
                idx_bytes=topk.ids.element_size(),
                topk_idx=topk.ids.data_ptr(),
                num_tokens_per_rank=at_ranks,
                num_tokens_per_expert=at_experts,
                is_token_in_rank=at_flags,
                scratch=engine.layout_scratch,
            )
        )
        per_rank, per_expert, in_rank = made.tensors()
        event = engine.end(async_finish, (topk.ids, per_rank, per_expert, in_rank))
        return per_rank, None, per_expert, in_rank, event

    # ---- Dispatch

    def dispatch(
        self,
        x: Payload,
        handle: Sequence[torch.Tensor] | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Dispatched:
        """Sends every token once to each rank that owns one of its experts.

        Args:
            x: bfloat16 [T, H], or a tuple of FP8 rows [T, H] and float32 or int32 scales [T, ns].
            handle: of an earlier dispatch: the same routing again, without an exchange of counts.
                Then the following six arguments must be None.
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert:
                from get_dispatch_layout; the second is None where the group is one node.
            topk_idx, topk_weights: int64 or int32 [T, K] and float32 [T, K]; both or neither.
            expert_alignment: counts per expert are rounded up to a multiple of this.
            num_worst_tokens: if positive, the result has exactly this many rows and the host waits
                for no count; needs the top-k tensors.
            config: accepted; only num_sms has a meaning here, and none on cpu.
            previous_event, async_finish, allocate_on_comm_stream: as in V1.

        Returns:
            recv_x [n, H], or a tuple with contiguous scales [n, ns]; rows by source rank, then by
            token. recv_topk_idx [n, K], ids of this rank's experts or -1. recv_topk_weights [n, K],
            0 where the id is -1. A list of El counts (empty with num_worst_tokens). The handle. The
            event. With `handle`, the second to fourth are None. Rows beyond the received ones are
            undefined, but their ids are -1.

        Raises:
            ValueError, TypeError: refused before anything was sent.
            CommTimeoutError, RankMismatchError, CapacityError: see reset().
        """
        self._engine.check_usable()
        arguments.check_event_arguments(previous_event, async_finish, allocate_on_comm_stream)
        engine = self._engine
        rows = arguments.check_payload(x, engine.device)
        arguments.check_capacity(rows.num_tokens, self.max_tokens_per_rank)
        num_blocks = engine.num_blocks(config, self.num_sms)
        if handle is not None:
            fresh = (
                num_tokens_per_rank,
                num_tokens_per_rdma_rank,
                is_token_in_rank,
                num_tokens_per_expert,
                topk_idx,
                topk_weights,
            )
            routing.check_cached(fresh, num_worst_tokens)
            engine.check_capture(host_waits=False)
            cached = self._own_handle(handle)
            engine.begin("dispatch", previous_event, async_finish)
            if isinstance(cached, InternodeHandle):
                received = internode.dispatch_cached(engine, rows, cached, num_blocks)
            else:
                received = routing.dispatch_cached(engine, rows, cached, num_blocks)
            event = engine.end(async_finish, (rows.x, rows.scales, *tensors_of(received)))
            return received, None, None, None, cached, event
        plan = routing.check_fresh(
            engine,
            rows,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
        )
        engine.check_capture(host_waits=num_worst_tokens == 0)
        engine.begin("dispatch", previous_event, async_finish)
        if engine.nodes.num_nodes > 1:
            result = internode.dispatch_fresh(
                engine, self._id, rows, plan, num_blocks, self.max_tokens_per_rank
            )
        else:
            result = routing.dispatch_fresh(engine, self._id, rows, plan, num_blocks)
        return (
            result.x,
            result.topk_idx,
            result.topk_weights,
            result.per_expert,
            result.handle,
            engine.end(
                async_finish,
                (rows.x, rows.scales, *plan.tensors(), *result.tensors()),
            ),
        )

    # ---- Combine

    def combine(
        self,
        x: torch.Tensor,
        handle: Sequence[torch.Tensor],
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Combined:
        """Sums the rows of each token over the ranks that received it; weights are the caller's.

        Args:
            x: bfloat16 [n, H], n rows as dispatch returned. Rows in exported memory (from empty(),
                or recv_x itself) are read where they lie; others are copied once.
            handle: of the dispatch.
            topk_weights: float32 [n, K], summed the same way.
            bias: None, bfloat16 [T, H], or a tuple of two, added first.
            config, previous_event, async_finish, allocate_on_comm_stream: as in dispatch.

        Returns:
            combined_x bfloat16 [T, H]: bias 0, bias 1, then ranks ascending, summed in FP32 in this
            order and rounded once. Where the group spans nodes, the ranks of each node are summed
            so and rounded, then bias 0, bias 1 and the nodes. combined_topk_weights float32 [T, K]
            or None. The event.

        Raises:
            as dispatch.
        """
        engine = self._engine
        engine.check_usable()
        arguments.check_event_arguments(previous_event, async_finish, allocate_on_comm_stream)
        known = self._own_handle(handle)
        sources = routing.check_combine(engine, known, x, topk_weights, bias)
        num_blocks = engine.num_blocks(config, self.num_sms)
        engine.check_capture(host_waits=False)
        engine.begin("combine", previous_event, async_finish)
        if isinstance(known, InternodeHandle):
            combined, weights = internode.combine_rows(engine, known, sources, num_blocks)
        else:
            combined, weights = routing.combine_rows(engine, known, sources, num_blocks)
        event = engine.end(async_finish, (*sources.tensors(), combined, weights))
        return combined, weights, event

    # ---- Helpers

    def _own_handle(self, handle: object) -> AnyHandle:
        """What a user passed as `handle=`, checked."""
        if self._engine.nodes.num_nodes > 1:
            return require_internode_handle(handle, self._id)
        return require_handle(handle, self._id)

    def _check_experts(self, num_experts: int) -> None:
        limit = self.group_size * _runtime.MAX_LOCAL_EXPERTS
        if not 1 <= num_experts <= limit:
            raise ValueError(
                f"num_experts is {num_experts}, but {self.group_size} ranks can own 1 to {limit} "
                f"({_runtime.MAX_LOCAL_EXPERTS} each)."
            )
