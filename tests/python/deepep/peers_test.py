"""Which GPUs can form one memory domain (D08)."""

import itertools

import pytest
from deepep.errors import UnsupportedConfigError
from deepep.peers import Reach, check_domain, check_ranks, largest_domain, missing_pairs

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


def reach(number: int, names: str = "abcdef") -> Reach:
    """GPU `number` of six in three joined pairs."""
    return Reach(names[number], tuple(names), (names[number ^ 1],))


def test_ranks_learn_at_first_contact_that_their_gpus_are_apart() -> None:
    """D08: NVLink only in the pairs (0, 1), (2, 3), (4, 5); four ranks are asked for."""
    with pytest.raises(UnsupportedConfigError) as caught:
        check_ranks([reach(number) for number in (0, 1, 4, 5)])
    text = str(caught.value)
    assert "num_ranks=4" in text and "(0, 4), (0, 5), (1, 4), (1, 5)" in text
    assert "2 ranks, on GPUs 0, 1: use CUDA_VISIBLE_DEVICES=0,1" in text
    check_ranks([reach(2), reach(3)])
    check_ranks([reach(2), reach(3), reach(2), reach(3)])  # several ranks on one device


def test_ranks_that_see_other_devices_are_named_themselves() -> None:
    ranks = [reach(0), Reach("b", ("b",), ()), Reach("c", ("c", "a"), ())]
    with pytest.raises(UnsupportedConfigError, match=r"pairs of ranks.*: \(0, 2\)\. Run only"):
        check_ranks(ranks)


def test_of_devices_that_nobody_sees_nothing_is_claimed() -> None:
    check_ranks([Reach("a", ("a",), ()), Reach("b", ("b",), ())])
