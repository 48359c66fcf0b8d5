"""What stands behind a Buffer: the ranks' first contact, libraries by shape, launches, faults.

Knows pointers and shapes, not the V1 API. Tensors whose memory peers reach are made here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from deepep import _runtime, blocks, contact, environment, errors, loading, refusal, registry, sizes
from deepep import network as networks
from deepep import nodes as places
from deepep.blocks import Made, Memory, Part, Piece
from deepep.config import Config
from deepep.errors import BufferStateError, KernelError
from deepep.events import EventHandle, EventOverlap
from deepep.groups import Communicator
from deepep.topology import Arch, PayloadType, Requirement, Topology
from deepep.version import __version__

WARM_BYTES = 1 << 20  # local tensors of this size and more come from the pool


Args = TypeVar("Args", contravariant=True)


class _Operation(Protocol[Args]):
    def __call__(self, domain: _runtime.Domain, args: Args, /) -> int: ...


class Engine:
    """One rank of one Buffer on the `host` architecture; CudaEngine is the same on a GPU.

    Args:
        comm: the ranks' communicator; used here and in reset.
        arch: which primitives the kernels are made of.
        timeout: seconds that each wait may last.
        ranks_per_node: see nodes.find.

    Raises:
        UnsupportedConfigError: the ranks differ in version or arch, cannot reach each other, or are
            spread over nodes as no network here can serve.
    """

    device = torch.device("cpu")
    stream = 0
    """Handle of the stream that the next operation is launched on."""
    layout_scratch = 0
    """Address of what blocks of a layout meet in; 0 where one thread is all blocks."""

    def __init__(
        self, comm: Communicator, arch: Arch, timeout: float, ranks_per_node: int | None = None
    ) -> None:
        self.comm = comm
        self.rank = comm.rank()
        self.num_ranks = comm.size()
        self.arch: Arch = arch
        self.timeout = timeout
        self._libraries: dict[str, _runtime.Library] = {}
        self._shapeless: _runtime.Library | None = None
        self._chosen: dict[tuple[int, PayloadType, Topology], registry.Selection] = {}
        self._faulted = False
        self._limbo: list[object] = []
        self._ticket = 0
        self._debug = environment.debugging()
        self.nodes = self._introduce(ranks_per_node)
        self._network: _runtime.Network | None = None
        self._domain: _runtime.Domain | None = self._connect()

    # ---- First contact

    def _make_domain(self) -> _runtime.Domain:
        return _runtime.Domain(self.nodes.local_rank, self.nodes.ranks_per_node)

    def _facts(self) -> contact.Facts:
        """What the ranks tell each other before their addresses."""
        return {"version": __version__, "host": contact.host_identity(), "arch": self.arch}

    def _introduce(self, ranks_per_node: int | None) -> places.Nodes:
        """Learns who the others are, and which of them share memory with this rank."""
        said = "None" if ranks_per_node is None else str(ranks_per_node)
        peers = contact.exchange(self.comm, {**self._facts(), "ranks_per_node": said})
        self._meet(peers)
        contact.check_alike(peers)
        hosts = [peer["host"] for peer in peers]
        nodes = places.find(self.rank, hosts, ranks_per_node)
        if nodes.num_nodes > 1:
            self._check_network(hosts)
        return nodes

    def _check_network(self, hosts: Sequence[str]) -> None:
        """Raises UnsupportedConfigError where nothing joins these machines."""
        if len(set(hosts)) > 1:
            raise refusal.several_machines(hosts)

    def _connect(self) -> _runtime.Domain:
        domain = self._make_domain()
        domain.set_timeout(self.timeout)
        descriptions = self.comm.all_gather(domain.describe())
        inside = [descriptions[rank] for rank in self.nodes.inside]
        contact.open_all(self.comm, lambda: domain.connect(inside))
        return domain

    def connect_nodes(self, num_channels: int, num_bytes: int, num_qps_per_rank: int) -> None:
        """Brings up the network between nodes; collective. See network.connect."""
        self._network = networks.connect(self.comm, self.nodes, num_channels, num_bytes)

    @property
    def network(self) -> _runtime.Network:
        """The network; only of a Buffer that spans nodes."""
        assert self._network is not None
        return self._network

    def _meet(self, peers: list[dict[str, str]]) -> None:
        """Looks at what the peers told, before anything is opened."""

    @property
    def domain(self) -> _runtime.Domain:
        if self._domain is None:
            raise BufferStateError("This Buffer was destroyed; make a new one.")
        return self._domain

    # ---- Libraries

    def library(
        self, hidden: int, dtype: PayloadType, topology: Topology = "intranode"
    ) -> _runtime.Library:
        """The library for rows of this shape, chosen by the registry and loaded at first use."""
        selection = self._chosen.get((hidden, dtype, topology))
        if selection is None:
            num_nodes = self.nodes.num_nodes if topology == "internode" else 1
            requirement = Requirement(topology, self.arch, hidden, dtype, self.num_ranks, num_nodes)
            selection = registry.select(requirement)
            self._load(selection.entry)
            self._chosen[hidden, dtype, topology] = selection
            if self._debug:
                environment.log.debug("rank %d: %s", self.rank, selection.reason)
        return self._libraries[selection.entry.name]

    def combine_library(self, hidden: int, topology: Topology = "intranode") -> _runtime.Library:
        """Every library can combine, so one that is loaded for this hidden size serves."""
        for size, dtype, kind in self._chosen:
            if size == hidden and kind == topology:
                return self.library(size, dtype, topology)
        return self.library(hidden, "bf16", topology)

    def any_library(self) -> _runtime.Library:
        """A library for what depends on no row: layout and the exchange of counts."""
        if self._shapeless is None:
            nodes = self.nodes.num_nodes
            topology: Topology = "intranode" if nodes == 1 else "internode"
            chosen = registry.select_shapeless(topology, self.arch, self.num_ranks, nodes)
            self._load(chosen.entry)
        assert self._shapeless is not None
        return self._shapeless

    def selections(self) -> list[registry.Selection]:
        """What was chosen so far, and why."""
        return list(self._chosen.values())

    def _load(self, entry: registry.VariantEntry) -> None:
        if entry.name in self._libraries:
            return
        library = loading.load(entry)
        self._libraries[entry.name] = library
        if entry.topology != "lowlatency" and self._shapeless is None:
            self._shapeless = library

    # ---- Streams

    def begin(
        self, operation: str, previous_event: EventOverlap | None, async_finish: bool
    ) -> None:
        """Orders what follows behind the caller's work; `operation` is "dispatch" or "combine"."""
        # What a synchronous operation returned has no event, and may be passed on all the same.
        if previous_event is not None and previous_event.event is not None:
            previous_event.current_stream_wait()

    def resume(self, operation: str, stream: int) -> None:
        """Lets what follows go on where an operation of this kind was begun: on that stream."""

    def end(self, async_finish: bool, tensors: Sequence[torch.Tensor | None]) -> EventOverlap:
        """Orders the caller behind what was launched, or returns the event of it."""
        return EventOverlap(EventHandle() if async_finish else None)

    @property
    def comm_stream(self) -> torch.cuda.Stream | None:
        """The communication stream; None where there are no streams."""
        return None

    def num_blocks(self, config: Config | None, default: int) -> int:
        """Thread blocks that an operation may use."""
        return 1

    # ---- Memory

    def local(self, *parts: Part) -> list[torch.Tensor]:
        """Uninitialised tensors for this rank alone."""
        return self.local_piece(*parts).tensors()

    def local_piece(self, *parts: Part) -> Memory:
        """The same, as tensors that are made of it later.

        Large ones come from the pool too: its memory is warm, while the C library gives large
        blocks back to the system and gets them anew, page by page.
        """
        if blocks.num_bytes(parts) >= WARM_BYTES:
            return self.piece(*parts)
        return Made([torch.empty(shape, dtype=dtype) for shape, dtype in parts])

    def empty(self, *parts: Part) -> list[torch.Tensor]:
        """Uninitialised tensors in one piece of exported memory, each aligned to 256 bytes."""
        return self.one_piece(*parts).tensors()

    def one_piece(self, *parts: Part) -> Memory:
        """The same, as tensors that are made of it later."""
        total = blocks.num_bytes(parts)
        if total == 0:
            return Made([self._exported_like(shape, dtype) for shape, dtype in parts])
        block = self.domain.allocate(total)
        return Piece(parts, block.address, lambda dtype: self._as_tensor(block, dtype))

    def piece(self, *parts: Part) -> Memory:
        """Uninitialised tensors that peers can reach, made later; in one piece where that pays."""
        return Made([self._exported_like(shape, dtype) for shape, dtype in parts])

    def _exported_like(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self._as_tensor(self.domain.allocate(size), dtype).view(shape)

    def _as_tensor(self, block: _runtime.Block, dtype: torch.dtype) -> torch.Tensor:
        """A block of the domain's pool as a tensor, which keeps it."""
        return torch.frombuffer(block, dtype=dtype)

    @functools.cached_property
    def zero_column(self) -> torch.Tensor:
        """int32 zeros [num_ranks, 1], a part of every handle."""
        return torch.zeros((self.num_ranks, 1), dtype=torch.int32, device=self.device)

    def exported(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` itself if peers can reach it, else uninitialised exported memory like it."""
        if self.is_exported(tensor):
            return tensor
        return self.empty((tuple(tensor.shape), tensor.dtype))[0]

    def workspace_memory(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised bytes that the domain exports by itself, whatever torch's allocator is."""
        return self._as_tensor(self.domain.allocate(num_bytes), torch.uint8)

    def is_exported(self, tensor: torch.Tensor) -> bool:
        """Whether peers can reach `tensor` where it lies."""
        size = tensor.numel() * tensor.element_size()
        return size == 0 or self.domain.exports(tensor.data_ptr(), size)

    def memory_pool(self) -> contextlib.AbstractContextManager[None]:
        """Where tensors made inside can be reached by peers; nothing changes on cpu."""
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        """About how much memory is left for tensors; 0 where nobody tells."""
        return sizes.free_host_bytes()

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of exported memory, held and in use."""
        return {"reserved": self.domain.reserved_bytes, "used": self.domain.used_bytes}

    # ---- Launches

    def next_ticket(self) -> int:
        """Number of a notify whose counts the host will wait for."""
        self._ticket += 1
        return self._ticket

    def received(self, ticket: int) -> int:
        """Waits for the counts of a notify; returns the number of rows."""
        begin = time.perf_counter_ns() if self._debug else 0
        if self.domain.await_counts(ticket, self.timeout * 1.5 + 1) != errors.STATUS_OK:
            raise self.fault()
        if self._debug:
            environment.log_time(self.rank, f"{self.domain.num_received} rows; wait", begin)
        return self.domain.num_received

    def received_per_expert(self) -> list[int]:
        """What the last received() learned of each local expert; until the next notify."""
        return self.domain.received_per_expert

    def layout(self, args: _runtime.LayoutArgs | _runtime.InternodeLayoutArgs) -> None:
        library = self.any_library()
        if isinstance(args, _runtime.LayoutArgs):
            status = library.layout(args)
        else:
            status = library.internode_layout(args)
        if status != errors.STATUS_OK:
            raise ValueError(f"get_dispatch_layout refuses: {library.last_error()}.")

    def run(
        self,
        library: _runtime.Library,
        operation: Callable[[_runtime.Library], _Operation[Args]],
        args: Args,
        keep: Sequence[object] = (),
    ) -> None:
        """Runs an operation of `library`; the caller has asked check_usable().

        `keep` is what peers may still write to when the operation fails half-way; it stays alive
        until reset().

        Raises:
            ValueError: refused before anything was sent; the Buffer stays usable.
            CommTimeoutError, RankMismatchError, CapacityError: no call is taken until reset().
        """
        begin = time.perf_counter_ns() if self._debug else 0
        try:
            status = operation(library)(self.domain, args)
        except BaseException:  # what a signal's handler raises while this waits, as Ctrl-C does
            if self.domain.fault_code == errors.STATUS_INTERRUPTED:
                self._faulted = True
                self._limbo.extend(keep)
            raise
        if self._debug:
            told = f"{type(args).__name__.removesuffix('Args')} of {library.facts['name']}"
            environment.log_time(self.rank, f"{told}, status {status},", begin)
        if status == errors.STATUS_OK:
            return
        if status == errors.STATUS_INVALID_ARGUMENT:
            raise ValueError(f"The kernel library refuses: {library.last_error()}.")
        if status == errors.STATUS_DEVICE_ERROR:
            raise KernelError(f"The device runtime reports {library.last_error()}.")
        self._limbo.extend(keep)
        raise self.fault()

    def fault(self) -> errors.DeepEPError:
        """Marks this rank as out of step and words the fault record, to be raised."""
        self._faulted = True
        fault = dict(self.domain.fault)
        fault["peers"] = self.nodes.ranks_of(fault["peers"], fault["nodes"])
        fault["rank"] += self.nodes.first
        error = errors.from_fault(fault, self.timeout)
        if reason := self.domain.directory_error:
            error.add_note(f"This rank could not open a peer's memory: {reason}")
        return error

    def fall_out_of_step(self) -> None:
        """This rank cannot go on with what its peers have begun with it: all need reset()."""
        self._faulted = True

    def check_usable(self) -> None:
        """Raises BufferStateError after destroy(), and between a fault and reset()."""
        domain = self.domain  # raises when destroyed
        if self._faulted:
            raise BufferStateError(
                "An earlier operation of this Buffer failed half-way, so its ranks are out of "
                "step. Call reset() on all ranks, or make a new Buffer."
            )
        if domain.fault_code != errors.STATUS_OK:  # of a kernel that was only launched
            raise self.fault()

    def check_capture(self, host_waits: bool) -> None:
        """Raises BufferStateError for a call that a stream capture in progress does not allow."""

    def synchronize(self) -> None:
        """Waits until the device has done all its work; there is nothing to wait for on cpu."""

    def reset(self) -> None:
        """Brings all ranks back in step after a fault; collective over the communicator."""
        # Two beyond what any rank has completed: one beyond what any rank has begun.
        mine = json.dumps(self.domain.epochs).encode()
        epochs = [json.loads(item) for item in self.comm.all_gather(mine)]
        if self._network is not None:  # by now no rank is inside an operation
            self._network.drop()
            self._network.clear()
        self.domain.reset([max(column) + 1 for column in zip(*epochs, strict=True)])
        self.comm.barrier()
        self._limbo.clear()
        self._faulted = False

    def close(self) -> None:
        """Lets go of the peers; waits for nobody."""
        if self._domain is not None:
            domain, self._domain = self._domain, None
            domain.close()
        if self._network is not None:
            self._network.close()
