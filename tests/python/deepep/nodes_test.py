"""Which ranks share memory, which are a rail, and what is refused."""

from __future__ import annotations

import pytest
from deepep import nodes
from deepep.errors import UnsupportedConfigError
from deepep.nodes import Nodes


def test_a_machine_is_a_node_unless_somebody_says_otherwise() -> None:
    hosts = ["a"] * 4 + ["b"] * 4
    assert nodes.find(5, hosts) == Nodes(5, 2, 4)
    assert nodes.find(5, hosts, 2) == Nodes(5, 4, 2)
    assert nodes.find(0, ["a"] * 3) == Nodes(0, 1, 3)


def test_places_of_a_rank() -> None:
    place = Nodes(rank=7, num_nodes=3, ranks_per_node=4)
    assert (place.node, place.local_rank, place.first) == (1, 3, 4)
    assert [*place.inside] == [4, 5, 6, 7]
    assert [*place.rail] == [3, 7, 11]


def test_bits_of_a_fault_become_bits_of_ranks() -> None:
    place = Nodes(rank=7, num_nodes=3, ranks_per_node=4)
    assert place.ranks_of(peers=0b0101, nodes=0) == 1 << 4 | 1 << 6
    assert place.ranks_of(peers=0, nodes=0b101) == 1 << 3 | 1 << 11
    assert Nodes(0, 1, 4).ranks_of(0b1010, 0) == 0b1010


@pytest.mark.parametrize(
    "hosts, size, words",
    [
        ("aaab", None, "different numbers of ranks (a: 3, b: 1)"),
        ("abab", None, "Ranks 0 to 1 are meant to be one node, but are on several machines (a, b)"),
        ("aabb", 4, "Ranks 0 to 3 are meant to be one node"),
        ("aaa", 2, "ranks_per_node=2 with 3 ranks"),
        ("aaa", 0, "ranks_per_node=0"),
        ("a" * 65, None, "1 nodes of 65 ranks: a group has at most 64 nodes of at most 64 ranks"),
        ("a" * 65, 1, "65 nodes of 1 ranks"),
    ],
)
def test_what_cannot_be(hosts: str, size: int | None, words: str) -> None:
    with pytest.raises(UnsupportedConfigError) as caught:
        nodes.find(0, [*hosts], size)
    assert words in str(caught.value)
