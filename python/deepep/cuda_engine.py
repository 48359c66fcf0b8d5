"""The engine on a GPU: streams and events, tensors from the Buffer's own memory pool, grids."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Sequence
from typing import Any, cast

import torch

from deepep import (
    _runtime,
    blocks,
    environment,
    errors,
    gpu_network,
    host_library,
    refusal,
    registry,
)
from deepep.blocks import Made, Memory, Part, Piece
from deepep.config import Config
from deepep.engine import Engine
from deepep.errors import BufferStateError, UnsupportedConfigError
from deepep.events import EventHandle, EventOverlap
from deepep.groups import Communicator
from deepep.peers import Reach, check_ranks
from deepep.topology import Arch

NO_POOL_VARIABLE = "DEEPEP_NO_MEMPOOL"
"""Set: work as with a torch that has no torch.cuda.MemPool (2.4 and older)."""

MPS_SHARE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def _thread_percentage() -> float:
    """What MPS lets this process use of a device, in percent; 100 where it does not limit it."""
    try:
        share = float(os.environ.get(MPS_SHARE_VARIABLE, ""))
    except ValueError:
        return 100.0
    return share if 0 < share < 100 else 100.0


class CudaEngine(Engine):
    """One rank of one Buffer on a CUDA device.

    Operations that finish before the caller goes on are launched on the caller's own stream;
    asynchronous ones on the communication stream, behind the caller's work or `previous_event`.
    Operations of one kind always run in the order of their calls. Where torch has no memory pools,
    or with `use_fabric`, result tensors come from the domain's own pool; one that is used on a
    stream other than its operation's must then be kept until that stream is done with it.
    """

    def __init__(
        self,
        comm: Communicator,
        arch: Arch,
        timeout: float,
        index: int,
        use_fabric: bool = False,
        ranks_per_node: int | None = None,
    ) -> None:
        self.device = torch.device("cuda", index)
        self._index = index
        self._pool: Any = None
        cuda: Any = torch.cuda
        native: Any = torch._C
        self._use_fabric = use_fabric  # torch's pools make memory that has no fabric handle
        if hasattr(cuda, "MemPool") and not (use_fabric or environment.value(NO_POOL_VARIABLE)):
            self._pool = cuda.MemPool()
            self._pool_id = self._pool.id
            self._begin_pool = native._cuda_beginAllocateCurrentThreadToPool
            self._end_pool = native._cuda_endAllocateToPool
            self._release_pool = native._cuda_releasePool
        self._comm_stream = cuda.Stream(self.device, priority=-1)
        self._current_raw_stream = native._cuda_getCurrentRawStream
        self._is_capturing = native._cuda_isCurrentStreamCapturing
        self._last: dict[str, int] = {}  # handle of the stream of each kind's last operation
        self._on_comm_stream = False
        self._has_run = False
        self._foreign: set[tuple[int, int]] = set()  # allocations known not to be of the pool
        self._sharing = 1
        super().__init__(comm, arch, timeout, ranks_per_node)
        self._max_blocks = self._resident_blocks()
        words = 1 + self.num_ranks * (1 + _runtime.MAX_LOCAL_EXPERTS) + self.nodes.num_nodes
        self._scratch = torch.zeros(words, dtype=torch.int32, device=self.device)
        torch.cuda.current_stream(index).synchronize()  # layouts come on any stream
        self.layout_scratch = self._scratch.data_ptr()

    # ---- First contact

    def _make_domain(self) -> _runtime.Domain:
        torch.empty(1, device=self.device)  # torch's context exists before the driver is asked
        try:
            return _runtime.Domain(
                self.nodes.local_rank, self.nodes.ranks_per_node, self._index, self._use_fabric
            )
        except RuntimeError as error:
            if not self._use_fabric:
                raise
            raise UnsupportedConfigError(f"use_fabric=True on {self.device}: {error}.") from error

    def _facts(self) -> dict[str, str]:
        count = range(torch.cuda.device_count())
        uuids = [_runtime.device_uuid(index).hex() for index in count]
        near = [uuids[i] for i in count if i != self._index and self._reaches(i)]
        seen = {"uuid": uuids[self._index], "seen": " ".join(uuids), "reached": " ".join(near)}
        return {**super()._facts(), **seen}

    def _check_network(self, hosts: Sequence[str]) -> None:
        if host_library.installed() is None:
            raise refusal.no_host_library(hosts)

    def connect_nodes(self, num_channels: int, num_bytes: int, num_qps_per_rank: int) -> None:
        gpu_network.set_defaults(num_qps_per_rank)
        nodes = self.nodes
        entry = registry.select_shapeless(
            "internode", self.arch, self.num_ranks, nodes.num_nodes
        ).entry
        self._load(entry)
        library, path = self._libraries[entry.name], str(entry.path)
        self._network = gpu_network.connect(
            self.comm, nodes, library, path, num_channels, num_bytes
        )

    def _load(self, entry: registry.VariantEntry) -> None:
        super()._load(entry)
        if entry.topology == "internode":
            gpu_network.join(self._libraries[entry.name], str(entry.path))

    def _reaches(self, other: int) -> bool:
        cuda: Any = torch.cuda
        return bool(cuda.can_device_access_peer(self._index, other))

    def _meet(self, peers: list[dict[str, str]]) -> None:
        devices = [peer.get("uuid", "") for peer in peers]
        self._sharing = devices.count(devices[self.rank])
        if len({peer["host"] for peer in peers}) == 1 and all(devices):
            check_ranks(
                [
                    Reach(peer["uuid"], tuple(peer["seen"].split()), tuple(peer["reached"].split()))
                    for peer in peers
                ]
            )

    def _resident_blocks(self) -> int:
        """Blocks of this rank that can run together with those of the ranks on the same device.

        Kernels wait for each other, so all their blocks must be resident. Under MPS with a thread
        percentage the device reports this process's share, which may be more than what is left for
        each where the shares overlap.
        """
        reported = _runtime.num_multiprocessors(self._index)
        share = _thread_percentage()
        whole = reported * 100 // share
        blocks = min(reported, whole // self._sharing)
        if blocks < 1:
            raise UnsupportedConfigError(
                f"{self._sharing} ranks share a device of {whole} multiprocessors, of which this "
                f"process may use {reported}; each rank needs at least one of its own, since their "
                f"kernels wait for each other. Run at most {whole} ranks on it."
            )
        name = "DEEPEP_SM_UTILIZATION"
        # A block may need a multiprocessor's whole shared memory, and two operations may run.
        halved = self._sharing > 1 and not environment.is_set(name)
        part = 0.5 if halved else environment.value(name)
        return max(1, int(blocks * part))

    def num_blocks(self, config: Config | None, default: int) -> int:
        wanted = default if config is None else config.num_sms
        return min(wanted, self._max_blocks)

    # ---- Streams

    @property
    def comm_stream(self) -> Any:
        return self._comm_stream

    def begin(
        self, operation: str, previous_event: EventOverlap | None, async_finish: bool
    ) -> None:
        raw = self._current_raw_stream(self._index)
        if not async_finish and previous_event is None:
            # The caller's own stream, by its handle alone: this is the way that must be short.
            self._on_comm_stream = False
            self.stream = raw
            if self._last.get(operation, raw) != raw:
                self._follow_last(operation, torch.cuda.current_stream(self._index))
            self._last[operation] = raw
            return
        stream = self._comm_stream
        waited = previous_event.event.event if previous_event and previous_event.event else None
        if waited is None:
            stream.wait_stream(torch.cuda.current_stream(self._index))
        else:
            stream.wait_event(waited)
        self._on_comm_stream = True
        self.stream = stream.cuda_stream
        if self._last.get(operation, self.stream) != self.stream:
            self._follow_last(operation, stream)
        self._last[operation] = self.stream

    def resume(self, operation: str, stream: int) -> None:
        self.stream = stream
        if self._last[operation] != stream:
            cuda: Any = torch.cuda
            self._follow_last(operation, cuda.ExternalStream(stream, device=self.device))
        self._last[operation] = stream

    def _follow_last(self, operation: str, stream: Any) -> None:
        """Orders `stream` behind the last operation of this kind, which ran on another one.

        A capture cannot wait for what it does not hold: there the caller has waited before it, and
        orders replays among other calls.
        """
        if not self._is_capturing():
            stream.wait_stream(self._stream_of(operation))

    def _stream_of(self, operation: str) -> Any:
        """The stream of the last operation of this kind."""
        cuda: Any = torch.cuda
        return cuda.ExternalStream(self._last[operation], device=self.device)

    def end(self, async_finish: bool, tensors: Sequence[torch.Tensor | None]) -> EventOverlap:
        if not self._on_comm_stream:
            return EventOverlap()
        if not async_finish:
            torch.cuda.current_stream(self._index).wait_stream(self._comm_stream)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._comm_stream)
        return EventOverlap(EventHandle(self._comm_stream) if async_finish else None)

    # ---- Memory

    def memory_pool(self) -> contextlib.AbstractContextManager[None]:
        if self._pool is None:
            return contextlib.nullcontext()
        return cast(
            "contextlib.AbstractContextManager[None]",
            torch.cuda.use_mem_pool(self._pool, self.device),
        )

    def local_piece(self, *parts: Part) -> Memory:
        if len(parts) == 1:
            return Made([torch.empty(parts[0][0], dtype=parts[0][1], device=self.device)])
        # torch takes longer to allocate than to carve, and that is done behind a launch.
        block = torch.empty(blocks.num_bytes(parts), dtype=torch.uint8, device=self.device)
        return Piece(parts, block.data_ptr(), block.view)

    def one_piece(self, *parts: Part) -> Memory:
        return super().one_piece(*parts) if self._pool is None else self.piece(*parts)

    def piece(self, *parts: Part) -> Memory:
        if self._pool is None:
            return super().piece(*parts)
        # If another MemPool went away in between, an assertion of torch's allocator would end the
        # process, and the garbage collector may find one whenever an object is made.
        collecting = gc.isenabled()
        gc.disable()
        # What use_mem_pool does, without its cost, which every operation would pay.
        self._begin_pool(self._index, self._pool_id)
        try:
            made = self.local_piece(*parts)
        finally:
            self._end_pool(self._index, self._pool_id)
            self._release_pool(self._index, self._pool_id)
            if collecting:
                gc.enable()
        if address := made.addresses[0]:  # the other parts are of the same allocation
            self.domain.export_allocation(address)
        return made

    def _as_tensor(self, block: _runtime.Block, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(block, device=self.device).view(dtype)

    def is_exported(self, tensor: torch.Tensor) -> bool:
        if super().is_exported(tensor):
            return True
        if self._pool is None:
            return False
        base, _, identity = _runtime.allocation_of(tensor.data_ptr())
        if (base, identity) not in self._foreign:
            if any(segment["address"] == base for segment in self._pool_segments()):
                self.domain.export_allocation(base)
                return True
            self._foreign.add((base, identity))
        return False

    def _pool_segments(self) -> list[dict[str, Any]]:
        """What torch's allocator tells of the pool's memory.

        Not by MemPool.snapshot(): of the two numbers of an id that it is given, torch (2.11) gives
        up a reference that it never took, so those that are no cached small integers are freed
        under their owner after a few calls.
        """
        cuda: Any = torch.cuda
        every: list[dict[str, Any]] = cuda.memory_snapshot()
        return [part for part in every if tuple(part["segment_pool_id"]) == self._pool_id]

    def free_bytes(self) -> int:
        cuda: Any = torch.cuda
        cached = cuda.memory_reserved(self.device) - cuda.memory_allocated(self.device)
        return int(cuda.mem_get_info(self.device)[0] + cached)

    def memory_bytes(self) -> dict[str, int]:
        if self._pool is None:
            return super().memory_bytes()
        segments = self._pool_segments()
        return {
            "reserved": sum(segment["total_size"] for segment in segments),
            "used": sum(segment["allocated_size"] for segment in segments),
        }

    # ---- Graph capture

    def check_capture(self, host_waits: bool) -> None:
        if not self._is_capturing():
            self._has_run = True
            return
        if not self._has_run:
            raise BufferStateError(
                "The first call of this Buffer comes inside a stream capture, where libraries "
                "cannot be loaded. Make the same calls once before the capture."
            )
        if host_waits:
            raise BufferStateError(
                "dispatch waits for the number of rows on the host, which a stream capture does "
                "not allow. Pass num_worst_tokens, or a handle."
            )

    # ---- Faults and the end

    def fault(self) -> errors.DeepEPError:
        time.sleep(0.002)  # other threads of the kernel may still be adding missing ranks
        return super().fault()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        self.synchronize()
        super().reset()

    def close(self) -> None:
        if self._domain is not None:
            self.synchronize()
        super().close()
