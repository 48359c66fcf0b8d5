"""Which GPUs can form one memory domain (D08)."""

import itertools

import pytest
from deepep.errors import UnsupportedConfigError
from deepep.peers import check_domain, largest_domain, missing_pairs

PAIRS_OF_TWO = [(0, 1), (2, 3), (4, 5)]


def test_four_ranks_on_three_pairs_are_refused_with_the_pairs_and_a_choice() -> None:
    with pytest.raises(UnsupportedConfigError) as caught:
        check_domain(4, range(6), PAIRS_OF_TWO)
    text = str(caught.value)
    assert "num_ranks=4" in text
    assert "(0, 2), (0, 3), (1, 2), (1, 3)" in text
    assert "(0, 1)" not in text
    assert "2 ranks, on GPUs 0, 1: use CUDA_VISIBLE_DEVICES=0,1" in text
    check_domain(2, range(6), PAIRS_OF_TWO)


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(UnsupportedConfigError, match="this machine has 2 GPUs"):
        check_domain(4, range(2), PAIRS_OF_TWO)


@pytest.mark.parametrize(
    ("reachable", "largest"),
    [
        ([], (0,)),
        ([(1, 0)], (0, 1)),
        ([(0, 1), (1, 2)], (0, 1)),
        ([(0, 1), (2, 3), (3, 4), (2, 4)], (2, 3, 4)),
        (list(itertools.combinations(range(6), 2)), (0, 1, 2, 3, 4, 5)),
    ],
)
def test_the_largest_domain(reachable: list[tuple[int, int]], largest: tuple[int, ...]) -> None:
    assert largest_domain(range(6), reachable) == largest
    assert missing_pairs(largest, reachable) == []


def test_sixteen_joined_gpus_are_searched_in_no_time() -> None:
    assert len(largest_domain(range(16), set(itertools.combinations(range(16), 2)))) == 16
