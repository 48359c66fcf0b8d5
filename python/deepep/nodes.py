"""How the ranks of a group are spread over nodes: memory domains, joined by a network.

Knows no torch. Rank numbers are node * ranks_per_node + number inside the node. Ranks of equal
number inside their nodes are a rail: what crosses nodes goes between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepep.errors import UnsupportedConfigError
from deepep.topology import MAX_NODES, MAX_RANKS_PER_DOMAIN


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where one rank is.

    Attributes:
        rank: of the group.
        num_nodes: 1 where all ranks share memory.
        ranks_per_node: the same on every node.
    """

    rank: int
    num_nodes: int
    ranks_per_node: int

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """Number of this rank inside its node."""
        return self.rank % self.ranks_per_node

    @property
    def first(self) -> int:
        """The lowest rank of this node."""
        return self.node * self.ranks_per_node

    @property
    def inside(self) -> range:
        """The ranks of this node."""
        return range(self.first, self.first + self.ranks_per_node)

    @property
    def rail(self) -> range:
        """The ranks of this rank's rail, by node."""
        return range(self.local_rank, self.num_nodes * self.ranks_per_node, self.ranks_per_node)

    def ranks_of(self, peers: int, nodes: int) -> int:
        """Bits of a fault record as bits of ranks: `peers` in this node, `nodes` on the rail."""
        mask = peers << self.first
        for node, rank in enumerate(self.rail):
            mask |= (nodes >> node & 1) << rank
        return mask


def find(rank: int, hosts: Sequence[str], ranks_per_node: int | None = None) -> Nodes:
    """Where `rank` is among ranks on these hosts.

    Args:
        rank: of the group.
        hosts: each rank's machine, by any name.
        ranks_per_node: says it explicitly, so that one machine can act as several nodes; must then
            divide the number of ranks on each machine. None: a machine is a node.

    Raises:
        UnsupportedConfigError: nodes of different sizes, ranks of a node that do not follow each
            other, or more ranks or nodes than there may be.
    """
    num_ranks = len(hosts)
    size = ranks_per_node
    if size is None:
        counts = {host: hosts.count(host) for host in hosts}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{host}: {count}" for host, count in counts.items())
            raise UnsupportedConfigError(
                f"The nodes of the group have different numbers of ranks ({listed}), but all must "
                "have as many. Make a group with equally many ranks on each machine."
            )
        size = counts[hosts[0]]
    if size < 1 or num_ranks % size:
        raise UnsupportedConfigError(
            f"ranks_per_node={size} with {num_ranks} ranks: it must divide the number of ranks."
        )
    for first in range(0, num_ranks, size):
        if len(set(hosts[first : first + size])) > 1:
            raise UnsupportedConfigError(
                f"Ranks {first} to {first + size - 1} are meant to be one node, but are on several "
                f"machines ({', '.join(sorted(set(hosts[first : first + size])))}). Number the "
                "ranks machine by machine, as launchers do, and give ranks_per_node at most the "
                "ranks of one machine."
            )
    num_nodes = num_ranks // size
    if size > MAX_RANKS_PER_DOMAIN or num_nodes > MAX_NODES:
        raise UnsupportedConfigError(
            f"{num_nodes} nodes of {size} ranks: a group has at most {MAX_NODES} nodes of at most "
            f"{MAX_RANKS_PER_DOMAIN} ranks. Use a smaller expert-parallel group."
        )
    return Nodes(rank, num_nodes, size)
