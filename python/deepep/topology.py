"""Who owns which expert, and what a Buffer asks of the registry.

Knows no torch: frameworks' planners and tests use it without a GPU.

Experts are owned in contiguous ranges. They need not divide by the ranks: with E = q * R + m the
first m ranks hold q + 1 experts, the others q. When m is 0 this is the usual split.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from deepep.errors import UnsupportedConfigError

Topology = Literal["intranode", "lowlatency", "internode"]
Arch = Literal["host", "sm80", "sm90"]
PayloadType = Literal["bf16", "fp8"]

ELEMENT_BYTES: dict[str, int] = {"bf16": 2, "fp8": 1}

ROW_ALIGNMENT_BYTES = 16
"""Rows are copied in 16-byte words, so their size must be a multiple of that."""

GPU_ARCHS: tuple[tuple[Arch, tuple[int, int]], ...] = (("sm90", (9, 0)), ("sm80", (8, 0)))
"""GPU architectures, the best one first, with the lowest compute capability that runs each."""

MAX_HIDDEN = 1 << 20
"""Largest hidden size that kernels are generated for; offsets inside rows stay within 32 bits."""

MAX_RANKS_PER_DOMAIN = 64
"""DEEPEP_MAX_RANKS of the ABI: ranks that share one memory domain."""

MAX_NODES = 64
"""DEEPEP_MAX_NODES of the ABI: memory domains that a group may span."""


def runnable_archs(capability: tuple[int, int]) -> list[Arch]:
    """The architectures that a GPU of this compute capability runs, the best one first."""
    return [arch for arch, lowest in GPU_ARCHS if capability >= lowest]


def _check_split(num_experts: int, num_ranks: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: a group has at least 1 rank.")
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts}: there must be at least 1 expert.")


def expert_range(num_experts: int, num_ranks: int, rank: int) -> range:
    """The experts that `rank` owns.

    Raises:
        ValueError: a count below 1, or a rank outside 0..num_ranks-1.
    """
    _check_split(num_experts, num_ranks)
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank={rank} is outside 0..{num_ranks - 1} (num_ranks={num_ranks}).")
    quotient, remainder = divmod(num_experts, num_ranks)
    start = rank * quotient + min(rank, remainder)
    return range(start, start + quotient + (rank < remainder))


@functools.lru_cache(maxsize=64)  # every dispatch asks, always the same
def num_local_experts(num_experts: int, num_ranks: int, rank: int) -> int:
    """How many experts `rank` owns; 0 is possible when there are fewer experts than ranks."""
    return len(expert_range(num_experts, num_ranks, rank))


def expert_owner(expert: int, num_experts: int, num_ranks: int) -> int:
    """The rank that owns `expert`.

    Raises:
        ValueError: a count below 1, or an expert outside 0..num_experts-1 (-1 has no owner).
    """
    _check_split(num_experts, num_ranks)
    if not 0 <= expert < num_experts:
        raise ValueError(f"expert={expert} is outside 0..{num_experts - 1}.")
    quotient, remainder = divmod(num_experts, num_ranks)
    boundary = remainder * (quotient + 1)
    if expert < boundary:
        return expert // (quotient + 1)
    return remainder + (expert - boundary) // quotient


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a kernel library must be able to do for one Buffer.

    Attributes:
        topology: "intranode", "lowlatency" or "internode".
        arch: "host", "sm80" or "sm90".
        hidden: elements of a row.
        dtype: type of the dispatch payload; combine is always BF16.
        num_ranks: ranks of the whole group.
        num_nodes: memory domains (nodes) they are spread over evenly; 1 except for internode.
    """

    topology: Topology
    arch: Arch
    hidden: int
    dtype: PayloadType
    num_ranks: int
    num_nodes: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the dispatch payload, without scales."""
        return self.hidden * ELEMENT_BYTES[self.dtype]

    @property
    def ranks_text(self) -> str:
        """The ranks as variant names write them: "8", or "8x4" for 8 ranks on each of 4 nodes."""
        if self.num_nodes == 1:
            return str(self.num_ranks)
        return f"{self.ranks_per_node}x{self.num_nodes}"

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one memory domain."""
        return self.num_ranks // self.num_nodes

    @property
    def variant_name(self) -> str:
        """Name of the variant made for exactly this requirement."""
        return f"{self.topology}_{self.arch}_h{self.hidden}_{self.dtype}_r{self.ranks_text}"

    def check(self) -> None:
        """Refuses what no variant can ever do.

        Raises:
            UnsupportedConfigError: hidden outside 1..2^20, a row that is not a multiple of 16
                bytes, or ranks and nodes that break the limits of the topology.
        """
        if not 1 <= self.hidden <= MAX_HIDDEN:
            raise UnsupportedConfigError(
                f"hidden={self.hidden}: a row has 1..{MAX_HIDDEN} elements. Pass the hidden size "
                "of the tokens."
            )
        if self.row_bytes % ROW_ALIGNMENT_BYTES:
            step = ROW_ALIGNMENT_BYTES // ELEMENT_BYTES[self.dtype]
            padded = -(-self.hidden // step) * step
            raise UnsupportedConfigError(
                f"hidden={self.hidden} dtype={self.dtype} makes rows of {self.row_bytes} bytes; "
                f"rows must be a multiple of {ROW_ALIGNMENT_BYTES} bytes, that is hidden a "
                f"multiple of {step}. Pad hidden to {padded}."
            )
        self._check_ranks()

    def _check_ranks(self) -> None:
        spans_nodes = self.topology == "internode"
        if spans_nodes != (self.num_nodes > 1) or self.num_nodes < 1:
            raise UnsupportedConfigError(
                f"num_nodes={self.num_nodes} with topology {self.topology}: internode joins 2 or "
                "more nodes, the other topologies 1. Choose internode for several nodes "
                "(8x4 is 8 ranks on each of 4), intranode or lowlatency for one."
            )
        if self.num_nodes > MAX_NODES:
            raise UnsupportedConfigError(
                f"num_nodes={self.num_nodes}: a group spans at most {MAX_NODES} nodes. Use a "
                "smaller expert-parallel group."
            )
        if self.num_ranks % self.num_nodes:
            raise UnsupportedConfigError(
                f"num_ranks={self.num_ranks} on {self.num_nodes} nodes: every node must have the "
                "same number of ranks. Make a group with equally many ranks on each node."
            )
        per_node = self.num_ranks // self.num_nodes
        if not 1 <= per_node <= MAX_RANKS_PER_DOMAIN:
            raise UnsupportedConfigError(
                f"num_ranks={self.num_ranks} on {self.num_nodes} nodes is {per_node} in one memory "
                f"domain, which holds 1..{MAX_RANKS_PER_DOMAIN}. Use a smaller expert-parallel "
                "group, or more nodes."
            )
