"""Low-latency mode of Buffer: dispatch and combine for decoding, with V1's signatures.

Letters in docstrings: R ranks, M `num_max_dispatch_tokens_per_rank`, T tokens of this rank, H
hidden size, K top-k, E experts, El experts of this rank, ns 4-byte scales of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepep import arguments, topology
from deepep import low_latency_calls as calls
from deepep.arguments import Payload
from deepep.errors import BufferStateError
from deepep.events import EventOverlap
from deepep.handles import LowLatencyHandle, require_low_latency_handle
from deepep.hooks import ORDER, ReceiveHook
from deepep.part import BufferPart
from deepep.workspace import Workspace, low_latency_bytes

Hook = Callable[[], None]
LowLatencyDispatched = tuple[Payload, torch.Tensor, LowLatencyHandle, EventOverlap, Hook | None]
LowLatencyCombined = tuple[torch.Tensor, EventOverlap, Hook | None]


class LowLatencyMode(BufferPart):
    """The part of Buffer that decoding uses. Needs a Buffer made with low_latency_mode=True."""

    _workspace: Workspace | None

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes to pass as num_rdma_bytes, for every low-latency call of these shapes.

        Without receive hooks and shrinking, and with expert rows that peers can read where they
        lie, nothing of it is needed: num_rdma_bytes=0 will do.
        """
        return low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    # ---- Dispatch

    def low_latency_dispatch(
        self,
        x: Payload,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> LowLatencyDispatched:
        """Sends every token once to each of its experts.

        Args:
            x: bfloat16 [T, H], T at most M; or FP8 rows [T, H] and their scales [T, ns], which are
                sent as they are.
            topk_idx: int64 or int32 [T, K]; -1 for none.
            num_max_dispatch_tokens_per_rank: M, the same on all ranks; may differ between calls.
            num_experts: E, split over the ranks as by get_dispatch_layout.
            cumulative_local_expert_recv_stats: int32 [El]; the received counts are added.
            dispatch_wait_recv_cost_stats: int64 [R]; nanoseconds waited for each rank are added.
            use_fp8: cast BF16 rows to float8_e4m3fn with one scale for 128 elements (the last group
                of a row may be short), see deepep.fp8.
            round_scale: powers of two as scales. use_ue8m0: their exponents packed in int32; needs
                round_scale.
            async_finish: the event orders the caller behind the operation, instead of the stream.
            return_recv_hook: only send; the hook receives. Between the two nothing runs on the
                device. Not together with async_finish.

        Returns:
            recv_x [El, R * M, H], or a tuple with scales [El, R * M, ns] whose strides are (.., 1,
            R * M); recv_count int32 [El]; the handle; the event; the hook or None. The first
            recv_count[e] rows of expert e are valid, by source rank, then by token.

        Raises:
            ValueError, TypeError: refused before anything was sent.
            BufferStateError: no low-latency Buffer, or an earlier dispatch waits for its hook.
            CommTimeoutError, RankMismatchError: see reset(). With enable_shrink, ranks that do not
                come are masked instead, with a RuntimeWarning that names them.
        """
        workspace = self._begin(async_finish, return_recv_hook, "dispatch")
        engine = self._engine
        sent = calls.check_dispatch(
            engine,
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            use_fp8,
            round_scale,
            use_ue8m0,
        )
        engine.begin(ORDER, None, async_finish)
        received = calls.dispatch(engine, workspace, self._id, sent, return_recv_hook)
        event = engine.end(async_finish, (*sent.tensors(), *received.tensors()))
        hook = None
        if return_recv_hook:
            launch = received.launch
            launch.call.phases = calls.RECEIVE
            hook = ReceiveHook(
                engine,
                workspace,
                "dispatch",
                lambda: calls.launch_dispatch(engine, launch),
                (sent, received),
            )
        workspace.name_masked(engine)
        return received.x, received.count, received.handle, event, hook

    # ---- Combine

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> LowLatencyCombined:
        """Sums each token's rows over its selections, with their weights.

        Args:
            x: bfloat16 [El, R * M, H], contiguous. Rows in exported memory (from empty(), or made
                under memory_pool()) are read where they lie, others are sent. With a hook they are
                always sent, so x may be overwritten at once.
            topk_idx, topk_weights: as at the dispatch, and float32 [T, K]. Selections that are -1
                here are left out.
            handle: of the dispatch.
            use_logfmt: rows travel in about 10 bits an element; lossy, for slow links.
            zero_copy: the rows are in the tensor that get_next_low_latency_combine_buffer returned;
                x is only checked.
            async_finish, return_recv_hook: as in the dispatch.
            out: bfloat16 [T, H], contiguous, for the result.
            combine_wait_recv_cost_stats: int64 [R]; nanoseconds waited for each rank are added.

        Returns:
            combined_x bfloat16 [T, H]: weight times row, rounded to FP32, summed in FP32 in the
            order of the selections and rounded once; zeros for a token without any. The event. The
            hook.

        Raises:
            as low_latency_dispatch.
        """
        workspace = self._begin(async_finish, return_recv_hook, "combine")
        engine = self._engine
        known = require_low_latency_handle(handle, self._id)
        if use_logfmt and zero_copy:
            raise ValueError("use_logfmt and zero_copy exclude each other: LogFMT makes new bytes.")
        rows, ids, weights, out = calls.check_combine(engine, known, x, topk_idx, topk_weights, out)
        wait_stats = calls.check_stats(
            "combine_wait_recv_cost_stats",
            combine_wait_recv_cost_stats,
            engine.num_ranks,
            torch.int64,
            engine.device,
        )
        if zero_copy:
            rows = self._take_next_combine(workspace, rows)
        engine.begin(ORDER, None, async_finish)
        combined = calls.combine(
            engine,
            workspace,
            known,
            rows,
            ids,
            weights,
            out,
            wait_stats,
            use_logfmt,
            owned=zero_copy,
            hook=return_recv_hook,
        )
        event = engine.end(async_finish, combined.used)
        hook = None
        if return_recv_hook:
            combined.call.phases = calls.RECEIVE
            hook = ReceiveHook(
                engine,
                workspace,
                "combine",
                lambda: calls.launch_combine(engine, combined),
                combined,
            )
        workspace.name_masked(engine)
        return combined.out, event, hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """A bfloat16 tensor [El, R * M, H] for the expert rows of the next combine.

        Contiguous (V1: strided), in exported memory; pass zero_copy=True to that combine.
        """
        workspace = self._low_latency()
        known = require_low_latency_handle(handle, self._id)
        _, _, max_tokens, hidden, num_experts = known
        num_local = topology.num_local_experts(num_experts, self.group_size, self.rank)
        (rows,) = self._engine.empty(
            ((num_local, self.group_size * max_tokens, hidden), torch.bfloat16)
        )
        workspace.next_combine = rows
        return rows

    def _take_next_combine(self, workspace: Workspace, x: torch.Tensor) -> torch.Tensor:
        rows, workspace.next_combine = workspace.next_combine, None
        if rows is None or rows.shape != x.shape:
            have = "none" if rows is None else f"one of {list(rows.shape)}"
            raise BufferStateError(
                f"zero_copy=True with x of {list(x.shape)}, but the buffer for the next combine is "
                f"{have}: call get_next_low_latency_combine_buffer(handle), write the rows into "
                "it, then combine once."
            )
        return rows

    # ---- Ranks that are left out

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Accepted, and nothing to do: calls of other shapes may follow without it."""
        self._low_latency()

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank, or takes it in again: masked ranks are neither sent to nor waited for.

        Each rank has its own mask; needs enable_shrink. Before a rank that missed operations is
        taken in again, call reset() on all ranks.
        """
        tensor = self._mask()
        if not 0 <= rank_to_mask < self.group_size:
            raise ValueError(
                f"rank_to_mask is {rank_to_mask}, but must be 0 to {self.group_size - 1}."
            )
        tensor[rank_to_mask] = int(mask)
        known = self._low_latency().known_masked
        (known.add if mask else known.discard)(rank_to_mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes 1 for each masked rank and 0 for the others into int32 [R]."""
        tensor = self._mask()
        arguments.check_tensor(
            "mask_status", mask_status, (self.group_size,), (torch.int32,), tensor.device
        )
        mask_status.copy_(tensor != 0)

    def low_latency_clean_mask_buffer(self) -> None:
        """Takes all ranks in again; see low_latency_update_mask_buffer."""
        self._mask().zero_()
        self._low_latency().known_masked.clear()

    # ---- Helpers

    def _low_latency(self) -> Workspace:
        self._engine.check_usable()
        if self._workspace is None:
            raise BufferStateError(
                "This Buffer was made without low_latency_mode=True; make it with that, and with "
                "num_rdma_bytes=Buffer.get_low_latency_rdma_size_hint(...)."
            )
        return self._workspace

    def _mask(self) -> torch.Tensor:
        mask = self._low_latency().mask
        if mask is None:
            raise BufferStateError("Ranks can be masked in a Buffer made with enable_shrink=True.")
        return mask

    def _begin(self, async_finish: bool, return_recv_hook: bool, kind: str) -> Workspace:
        """What both operations check first."""
        workspace = self._low_latency()
        if async_finish and return_recv_hook:
            raise ValueError(
                "async_finish and return_recv_hook exclude each other: the hook orders by itself."
            )
        if kind in workspace.unreceived:
            raise BufferStateError(
                f"An earlier low_latency_{kind} of this Buffer waits for its hook. Call that hook "
                f"before the next {kind} (a {'combine' if kind == 'dispatch' else 'dispatch'} may "
                "come between), on all ranks; after reset() it is forgotten."
            )
        self._engine.check_capture(host_waits=False)
        return workspace
