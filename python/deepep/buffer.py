"""Buffer: DeepEP V1's communicator, for ranks that share one memory domain.

The signatures and result structures are V1's; the parameters after `*` are additions. Numbers in
docstrings: R ranks, T tokens of this rank, H hidden size, K top-k, E experts, El experts of this
rank, n received rows.
"""

from __future__ import annotations

import contextlib
import itertools
from types import TracebackType
from typing import Any, Self

import torch

from deepep import _runtime, arguments, environment, refusal, registry, topology
from deepep import config as configs
from deepep.config import Config
from deepep.devices import make_engine
from deepep.environment import check_timeout, default_timeout
from deepep.events import EventHandle, EventOverlap
from deepep.groups import wrap
from deepep.low_latency import LowLatencyMode
from deepep.throughput import Combined, Dispatched, Layout, ThroughputMode
from deepep.workspace import Workspace

__all__ = ["Buffer", "Combined", "Dispatched", "Layout"]

_buffer_ids = itertools.count(1)


class Buffer(ThroughputMode, LowLatencyMode):
    """Dispatch and combine among the ranks of a group.

    Args:
        group: torch process group, mpi4py communicator, deepep.testing.ThreadGroup, or None for a
            world of one rank.
        num_qps_per_rank: queue pairs of the network card to each peer; only where GPUs are on
            several nodes, and the variable of the network is not set.
        num_nvl_bytes, allow_nvlink_for_low_latency_mode, allow_mnnvl:
            accepted for compatibility. Rows are written straight into result tensors, so no
            buffer has to be sized for dispatch and combine inside a node.
        num_rdma_bytes: with low_latency_mode, bytes of this rank's workspace, the same on all
            ranks; see get_low_latency_rdma_size_hint. Where the group spans nodes, bytes of network
            memory, the same on all ranks; 0: enough for rows of 16 KiB. Else not needed.
        low_latency_mode: the low_latency_* methods may be called, beside the others.
        explicitly_destroy: accepted; destroy() may always be called, and need not be.
        enable_shrink: low-latency operations go on without ranks that do not come; needs
            low_latency_mode.
        comm: an mpi4py communicator, used instead of `group`.
        use_fabric: on a GPU: export memory by fabric handle instead of CUDA IPC. Results then come
            from the Buffer's own pool instead of one of torch, and memory_pool() has no effect.
        device: where tensors live: "cpu" (the `host` architecture) or "cuda" (the current device).
            None: "cuda" where torch sees a GPU and a library for it is built, else "cpu".
        arch: "sm80" or "sm90" on a GPU; None: the best built one that the device can run.
        hidden, dtype: shape of the rows; when given, the kernel library is chosen and loaded now
            instead of at the first call. dtype is torch.bfloat16 (or None), or an FP8 type.
        timeout: seconds that each wait for a peer may last. None: DEEPEP_TIMEOUT, else 100.
        max_tokens_per_rank: dispatch refuses more tokens than this.
        ranks_per_node: ranks of one node. None: those of one machine. One machine can so act as
            several nodes. Between nodes there are num_sms // 2 channels, as num_sms is now.

    Raises:
        UnsupportedConfigError: no kernel library fits, no network here joins the nodes, or a mode
            or use_fabric is not available.
        KernelLoadError: a library does not fit its manifest or this package.
        TypeError: `group` is of no accepted kind.

    Collective over the group. A Buffer is used by one thread at a time.
    """

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
        ranks_per_node: int | None = None,
    ) -> None:
        if enable_shrink and not low_latency_mode:
            raise ValueError(
                "enable_shrink=True with low_latency_mode=False: only low-latency operations can "
                "go on without a rank. Pass low_latency_mode=True, or leave enable_shrink out."
            )
        environment.check()
        seconds = default_timeout() if timeout is None else check_timeout(timeout, f"{timeout=}")
        payload = arguments.payload_type(dtype)
        if max_tokens_per_rank is not None and max_tokens_per_rank < 0:
            raise ValueError(f"{max_tokens_per_rank=}: must be at least 0, or None for no limit.")
        communicator = wrap(group, comm)
        self._engine = make_engine(communicator, device, arch, seconds, use_fabric, ranks_per_node)
        if self._engine.nodes.num_nodes > 1:
            if low_latency_mode:
                raise refusal.no_low_latency_network(self._engine.nodes)
            channels = max(1, min(self.num_sms // 2, _runtime.MAX_CHANNELS))
            self._engine.connect_nodes(channels, num_rdma_bytes, num_qps_per_rank)
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
            mode: topology.Topology = "lowlatency" if low_latency_mode else "intranode"
            if self._engine.nodes.num_nodes > 1:
                mode = "internode"
            self._engine.library(hidden, payload, mode)
        self._workspace = None
        if low_latency_mode:
            self._workspace = Workspace(self._engine, num_rdma_bytes, enable_shrink)

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
        if self._workspace is not None:
            self._workspace.forget()

    def check(self) -> None:
        """Raises what an operation left that failed after its call had returned, as on a GPU.

        Every call of the Buffer looks by itself; this is for loops that only replay CUDA graphs. It
        waits for nothing: synchronize before, to see the latest replay.

        Raises:
            CommTimeoutError, RankMismatchError, CapacityError, KernelError: the failure, once.
            BufferStateError: destroyed, or a failure was raised before and reset() was not called.
        """
        self._engine.check_usable()

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
