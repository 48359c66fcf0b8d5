"""Buffer: DeepEP V1's communicator, for ranks that share one memory domain.

The signatures and result structures are V1's; the parameters after `*` are additions. Numbers in
docstrings: R ranks, T tokens of this rank, H hidden size, K top-k, E experts, El experts of this
rank, n received rows.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar, Self

import torch

from deepep import _runtime, arguments, registry, routing, topology
from deepep import config as configs
from deepep.arguments import Payload, tensors_of
from deepep.config import Config
from deepep.devices import make_engine
from deepep.engine import check_timeout, default_timeout
from deepep.errors import UnsupportedConfigError
from deepep.events import EventHandle, EventOverlap
from deepep.groups import wrap
from deepep.handles import DispatchHandle, require_handle

_buffer_ids = itertools.count(1)

Layout = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]
Dispatched = tuple[
    Payload,
    torch.Tensor | None,
    torch.Tensor | None,
    list[int] | None,
    DispatchHandle,
    EventOverlap,
]
Combined = tuple[torch.Tensor, torch.Tensor | None, EventOverlap]


class Buffer:
    """Dispatch and combine among the ranks of a group.

    Args:
        group: torch process group, mpi4py communicator, deepep.testing.ThreadGroup, or None for a
            world of one rank.
        num_nvl_bytes, num_rdma_bytes, num_qps_per_rank, allow_nvlink_for_low_latency_mode,
            allow_mnnvl, use_fabric: accepted for compatibility. Rows are written straight into
            result tensors, so no buffer has to be sized.
        low_latency_mode: not available yet.
        explicitly_destroy: accepted; destroy() may always be called, and need not be.
        enable_shrink: not available yet (low-latency mode).
        comm: an mpi4py communicator, used instead of `group`.
        device: where tensors live: "cpu" (the `host` architecture) or "cuda" (the current device).
            None: "cuda" where torch sees a GPU and a library for it is built, else "cpu".
        arch: "sm80" or "sm90" on a GPU; None: the best built one that the device can run.
        hidden, dtype: shape of the rows; when given, the kernel library is chosen and loaded now
            instead of at the first call. dtype is torch.bfloat16 (or None), or an FP8 type.
        timeout: seconds that each wait for a peer may last. None: DEEPEP_TIMEOUT, else 100.
        max_tokens_per_rank: dispatch refuses more tokens than this.

    Raises:
        UnsupportedConfigError: no kernel library fits, the ranks run on several machines, or a mode
            is not available.
        KernelLoadError: a library does not fit its manifest or this package.
        TypeError: `group` is of no accepted kind.

    Collective over the group. A Buffer is used by one thread at a time.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        use_fabric: bool = False,
        device: torch.device | str | None = None,
        arch: topology.Arch | None = None,
        hidden: int | None = None,
        dtype: torch.dtype | None = None,
        timeout: float | None = None,
        max_tokens_per_rank: int | None = None,
    ) -> None:
        if low_latency_mode or enable_shrink:
            raise UnsupportedConfigError(
                "low_latency_mode and enable_shrink are not available in this version; make the "
                "Buffer without them and use dispatch and combine."
            )
        seconds = default_timeout() if timeout is None else check_timeout(timeout, f"{timeout=}")
        payload = arguments.payload_type(dtype)
        if max_tokens_per_rank is not None and max_tokens_per_rank < 0:
            raise ValueError(f"{max_tokens_per_rank=}: must be at least 0, or None for no limit.")
        communicator = wrap(group, comm)
        self._engine = make_engine(communicator, device, arch, seconds)
        self._id = next(_buffer_ids)
        self.rank = self._engine.rank
        self.group_size = self._engine.num_ranks
        self.group = group if group is not None else comm
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.max_tokens_per_rank = max_tokens_per_rank
        if hidden is not None:
            self._engine.library(hidden, payload)

    # ---- Life cycle

    def destroy(self) -> None:
        """Lets go of the peers' memory. Waits for no rank; tensors stay valid. May be repeated."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.destroy()

    def reset(self) -> None:
        """Makes the Buffer usable again after a timeout or mismatch; collective over the group.

        Results of the failed operation are undefined; those of earlier ones stay valid. Raises what
        the group's own communication raises when a rank is gone for good.
        """
        self._engine.reset()

    # ---- Small methods

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets how many multiprocessors kernels use by default; even. No effect on cpu."""
        if new_num_sms < 2 or new_num_sms % 2:
            raise ValueError(f"num_sms is {new_num_sms}, but must be even and at least 2.")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether a library for SM90 is there."""
        return any(entry.arch == "sm90" for entry in registry.variants())

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream, to pass as `previous_event`."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """V1's recommended Config for this many ranks; every number of ranks has one."""
        return configs.default_dispatch_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """V1's recommended Config for this many ranks; every number of ranks has one."""
        return configs.default_combine_config(num_ranks, Buffer.num_sms)

    def get_comm_stream(self) -> torch.cuda.Stream | None:
        """The communication stream; None on cpu, where operations finish before they return."""
        return self._engine.comm_stream

    @property
    def timeout(self) -> float:
        """Seconds that each wait may last."""
        return self._engine.timeout

    def chosen_variants(self) -> list[str]:
        """The kernel libraries chosen so far, each with the reason."""
        return [selection.reason for selection in self._engine.selections()]

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """An uninitialised tensor that peers can reach; combine reads its rows where they lie."""
        return self._engine.empty((shape, dtype))[0]

    def memory_pool(self) -> contextlib.AbstractContextManager[None]:
        """On a GPU: tensors made inside are ones that combine needs not copy.

        On cpu torch has no such pool; make the expert output with empty() for the same effect.
        """
        return self._engine.memory_pool()

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of exported memory: held by this Buffer, and in use by tensors."""
        return self._engine.memory_bytes()

    # ---- Layout

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
            num_tokens_per_rank int32 [R]; None (no network ranks); num_tokens_per_expert int32 [E];
            is_token_in_rank bool [T, R]; the event.

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
        counts, in_rank = engine.local(
            ((self.group_size + num_experts,), torch.int32),  # side by side: zeroed at once
            ((num_tokens, self.group_size), torch.bool),
        )
        per_rank, per_expert = counts[: self.group_size], counts[self.group_size :]
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
                num_tokens_per_rank=per_rank.data_ptr(),
                num_tokens_per_expert=per_expert.data_ptr(),
                is_token_in_rank=in_rank.data_ptr(),
            )
        )
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
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: from get_dispatch_layout.
            num_tokens_per_rdma_rank: must be None.
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
            cached = require_handle(handle, self._id)
            engine.begin("dispatch", previous_event, async_finish)
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
        result = routing.dispatch_fresh(engine, self._id, rows, plan, num_blocks)
        used = (rows.x, rows.scales, *plan.tensors(), *result.tensors())
        return (
            result.x,
            result.topk_idx,
            result.topk_weights,
            result.per_expert,
            result.handle,
            engine.end(async_finish, used),
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
            order and rounded once. combined_topk_weights float32 [T, K] or None. The event.

        Raises:
            as dispatch.
        """
        engine = self._engine
        engine.check_usable()
        arguments.check_event_arguments(previous_event, async_finish, allocate_on_comm_stream)
        known = require_handle(handle, self._id)
        sources = routing.check_combine(engine, known, x, topk_weights, bias)
        num_blocks = engine.num_blocks(config, self.num_sms)
        engine.check_capture(host_waits=False)
        engine.begin("combine", previous_event, async_finish)
        combined, weights = routing.combine_rows(engine, known, sources, num_blocks)
        event = engine.end(async_finish, (*sources.tensors(), combined, weights))
        return combined, weights, event

    # ---- Helpers

    def _check_experts(self, num_experts: int) -> None:
        limit = self.group_size * _runtime.MAX_LOCAL_EXPERTS
        if not 1 <= num_experts <= limit:
            raise ValueError(
                f"num_experts is {num_experts}, but {self.group_size} ranks can own 1 to {limit} "
                f"({_runtime.MAX_LOCAL_EXPERTS} each)."
            )
