"""Brings up the network between GPUs: NVSHMEM, once in a process, and symmetric memory from it.

A process joins one world of ranks, and every kernel library across nodes joins it by itself, since
each holds a copy of the device library. Memory is never given back: that would be collective, and
destroying a Buffer waits for nobody. Knows no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from deepep import _runtime, environment, network
from deepep.errors import UnsupportedConfigError
from deepep.groups import Communicator
from deepep.nodes import Nodes


class World(NamedTuple):
    """What this process has joined."""

    id: bytes
    rank: int
    num_ranks: int


_world: World | None = None
_joined: set[str] = set()


def set_defaults(num_qps_per_rank: int) -> None:
    """Variables of the network that nobody has set; read when the first library joins."""
    defaults = {
        "NVSHMEM_IB_ENABLE_IBGDA": "1",
        "NVSHMEM_IBGDA_NUM_RC_PER_PE": str(max(1, num_qps_per_rank)),
    }
    if environment.is_set("DEEPEP_ADAPTIVE_ROUTING"):
        # Fabrics route adaptively on the service levels that they are set up for; 1 is usual.
        defaults["NVSHMEM_IB_SL"] = "1" if environment.value("DEEPEP_ADAPTIVE_ROUTING") else "0"
    environment.set_defaults(defaults)


def join(library: _runtime.Library, path: str) -> None:
    """Takes a loaded library into the world that this process has joined. Collective."""
    if _world is None or path in _joined:
        return
    try:
        library.network_join(*_world)
    except RuntimeError as error:
        raise UnsupportedConfigError(f"The network between nodes is not there: {error}.") from error
    _joined.add(path)


def connect(
    comm: Communicator,
    nodes: Nodes,
    library: _runtime.Library,
    path: str,
    num_channels: int,
    num_bytes: int,
) -> _runtime.Network:
    """Joins the world with a first library, and allocates network memory; collective.

    Args:
        library, path: a kernel library across nodes, and its file.
        num_channels, num_bytes: as in network.connect.

    Raises:
        UnsupportedConfigError: the ranks disagree about sizes, this process is in another world, or
            NVSHMEM cannot be brought up or has no memory; the text has its words.
        ValueError: num_bytes leaves no room for rows.
    """
    global _world
    size = num_bytes or network.default_bytes(nodes, num_channels)
    network.check_alike(comm, {"num_rdma_bytes": size, "channels": num_channels})
    place = (nodes.rank, comm.size())
    is_other = _world is not None and (_world.rank, _world.num_ranks) != place
    known = b"other" if is_other else _world.id if _world is not None else b""
    if len({*comm.all_gather(known), known}) > 1 or is_other:
        raise UnsupportedConfigError(
            "This process, or a peer, has made a Buffer across nodes with other ranks before; a "
            "process can be in one such group only. Start new processes for another one."
        )
    try:
        if _world is None:
            made = library.network_make_id() if nodes.rank == 0 else b""
            _world = World(comm.all_gather(made)[0], nodes.rank, comm.size())
        join(library, path)
        memory = library.network_allocate(size)
    except RuntimeError as error:
        raise UnsupportedConfigError(f"The network between nodes is not there: {error}.") from error
    return _runtime.Network(
        nodes.node,
        nodes.num_nodes,
        nodes.local_rank,
        nodes.ranks_per_node,
        num_channels,
        size,
        memory=memory,
    )
