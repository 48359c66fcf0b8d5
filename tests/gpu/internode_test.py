"""Dispatch and combine over nodes on GPUs: ranks of one machine act as nodes, NVSHMEM joins them.

The cases are those of the CPU, and so are the answers.
"""

from __future__ import annotations

from typing import Any

import pytest
from deepep import Buffer, UnsupportedConfigError, registry

from tests.distributed import checks
from tests.distributed.cases import cases_of, find
from tests.distributed.checks import expect
from tests.gpu.ranks import Rank, on_ranks

NAMES = [case.name for case in cases_of(2)]
PER_NODE = {2: (1,), 4: (2, 1), 8: (4, 2)}
"""Ranks of a node, by the number of ranks."""


def buffer_of(rank: Rank, per_node: int) -> Buffer:
    """One for all tests of this shape: a process never gives network memory back."""
    key = f"{rank.arch} in nodes of {per_node}"
    if not any(
        (entry.topology, entry.arch) == ("internode", rank.arch) for entry in registry.variants()
    ):
        pytest.skip(f"no internode library for {rank.arch} is built")
    if key not in rank.shared:
        try:
            rank.shared[key] = rank.new_buffer(ranks_per_node=per_node)
        except UnsupportedConfigError as error:
            if "other ranks before" not in str(error):
                raise
            pytest.skip(str(error))
    return rank.shared[key]


@on_ranks(counts=(8,), choices=NAMES)
def test_results_equal_the_reference(rank: Rank, name: str) -> None:
    for per_node in PER_NODE[rank.size]:
        buffer = buffer_of(rank, per_node)
        expected = expect(find(name, rank.size), per_node)
        handle = checks.round_trip(buffer, expected)
        received = buffer.dispatch(checks.payload(buffer, expected), handle)[0]
        n = expected.received(rank.index)
        want: Any = expected.dispatched[rank.index].recv_x
        checks.same_payload("cached recv_x", checks.first(received, n), want)
        checks.combine(buffer, expected, handle)


@on_ranks(counts=(8,))
def test_rounds_without_a_sync_between_them(rank: Rank) -> None:
    buffer = buffer_of(rank, 4)
    wanted = [expect(find(name, rank.size), 4) for name in ("plain", "odd_counts", "fp8")]
    kept = [checks.dispatch(buffer, wanted[number % 3]) for number in range(60)]
    for number, result in enumerate(kept):
        checks.check_dispatched(result, wanted[number % 3], rank.index)
    for _ in range(20):
        for expected, result in zip(wanted, kept, strict=False):
            checks.combine(buffer, expected, result[4])
