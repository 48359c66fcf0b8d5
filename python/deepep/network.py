"""Brings up a Buffer's network between nodes, and sizes its memory."""

from __future__ import annotations

import json

from deepep import _runtime, contact, environment
from deepep.errors import UnsupportedConfigError
from deepep.groups import Communicator
from deepep.nodes import Nodes

DEFAULT_MESSAGE_BYTES = 16 * 1024
"""A row of 7168 BF16 elements and what travels beside it."""
DEFAULT_SLOTS = 8
"""Messages on their way between two ranks on one channel, before the sender waits."""


def default_bytes(nodes: Nodes, num_channels: int) -> int:
    """Bytes of network memory of a Buffer that was made without num_rdma_bytes."""
    return _runtime.network_memory_hint(
        nodes.num_nodes, nodes.ranks_per_node, num_channels, DEFAULT_MESSAGE_BYTES, DEFAULT_SLOTS
    )


def check_alike(comm: Communicator, facts: dict[str, int]) -> None:
    """Raises UnsupportedConfigError where ranks differ in one of the facts; collective."""
    every = [json.loads(item) for item in comm.all_gather(json.dumps(facts).encode())]
    for name, mine in facts.items():
        values = [item[name] for item in every]
        if len(set(values)) > 1:
            raise UnsupportedConfigError(
                f"{name} must be the same on all ranks, but is {mine} here and "
                f"{sorted(set(values))} on all. Make the Buffer with the same arguments everywhere."
            )


def connect(
    comm: Communicator, nodes: Nodes, num_channels: int, num_bytes: int
) -> _runtime.Network:
    """Makes this rank's network memory and finds the rail's; collective over the group.

    Args:
        num_channels: queues between two ranks of a rail.
        num_bytes: of network memory; 0: default_bytes.

    Raises:
        UnsupportedConfigError: the ranks disagree about sizes, or cannot reach each other's memory.
        ValueError: num_bytes leaves no room for rows.
    """
    size = num_bytes or default_bytes(nodes, num_channels)
    check_alike(comm, {"num_rdma_bytes": size, "channels": num_channels})
    seed = environment.value("DEEPEP_NETWORK_SEED")
    network = _runtime.Network(
        nodes.node,
        nodes.num_nodes,
        nodes.local_rank,
        nodes.ranks_per_node,
        num_channels,
        size,
        seed * 4096 + nodes.rank if seed else 0,
    )
    descriptions = comm.all_gather(network.describe())
    rail = [descriptions[rank] for rank in nodes.rail]
    contact.open_all(comm, lambda: network.connect(rail), " on other nodes")
    return network
