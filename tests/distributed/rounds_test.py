"""Many rounds on one Buffer: changing shapes, ranks that run at their own pace, several Buffers."""

import random
import time
from dataclasses import replace

import pytest
from deepep import Buffer
from deepep.testing import ThreadGroup, run_ranks

from tests.distributed import checks
from tests.distributed.cases import Case, cases_of, find, random_case
from tests.distributed.checks import expect


def test_shapes_change_from_call_to_call_without_a_clean_up() -> None:
    """D17: 200 calls, at most 1, 2, 4, 8, 244 tokens, hidden 7168 and 4096 in turn."""
    chosen = [
        expect(
            Case(f"{most}x{hidden}", (most, most // 2, 1, most), hidden, 16, 4, "holes", seed=most)
        )
        for most in (1, 2, 4, 8, 244)
        for hidden in (7168, 4096)
    ]
    # The two largest take most of the time, so they come in the first 40 calls only.
    order = [index % 10 for index in range(40)] + [index % 8 for index in range(160)]

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=30) as buffer:
            for index in order:
                checks.round_trip(buffer, chosen[index])

    run_ranks(4, work)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 12])
def test_any_case_follows_any_other(num_ranks: int) -> None:
    chosen = [expect(random_case(seed, num_ranks)) for seed in range(100, 140)]

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=30) as buffer:
            for expected in chosen:
                checks.round_trip(buffer, expected)

    run_ranks(num_ranks, work)


@pytest.mark.parametrize("num_ranks, rounds", [(2, 150), (4, 80), (12, 20)])
def test_ranks_at_their_own_pace_stay_in_step(num_ranks: int, rounds: int) -> None:
    """Each rank dawdles at random places, so every one is once ahead of and behind each other."""
    chosen = [expect(random_case(seed, num_ranks)) for seed in range(200, 206)]

    def work(group: ThreadGroup) -> None:
        r = random.Random(group.rank())

        def dawdle() -> None:
            if r.random() < 0.4:
                time.sleep(r.choice((0.0001, 0.001, 0.004)))

        with Buffer(group, timeout=30) as buffer:
            handles = [checks.round_trip(buffer, expected) for expected in chosen]
            for index in range(rounds):
                expected, handle = chosen[index % 6], handles[index % 6]
                dawdle()
                result = checks.dispatch(buffer, expected)
                dawdle()
                checks.check_dispatched(result, expected, group.rank())
                checks.combine(buffer, expected, result[4])
                dawdle()
                buffer.dispatch(checks.payload(buffer, expected), handle=handle)
                dawdle()
                checks.combine(buffer, expected, handle, exported=True)

    run_ranks(num_ranks, work)


def test_several_buffers_of_one_group_do_not_meet() -> None:
    """Each has its own memory and its own counting; the ranks need not alternate alike."""
    names = ("odd_counts", "holes", "fp8_packed_scales")
    chosen = [expect(replace(find(name, 3), hidden=64)) for name in names]

    def work(group: ThreadGroup) -> None:
        buffers = [Buffer(group, timeout=20) for _ in chosen]
        for round_number in range(10):
            for buffer, expected in zip(buffers, chosen, strict=True):
                for _ in range(1 + round_number % 2):
                    checks.round_trip(buffer, expected)
        for buffer in buffers:
            buffer.destroy()

    run_ranks(3, work)


def test_the_largest_domain_works() -> None:
    """64 ranks, DEEPEP_MAX_RANKS: every bit of a mask of ranks is used."""
    expected = expect(Case("largest", (3,) * 64, 64, 130, 6, "holes"))

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=60) as buffer:
            checks.round_trip(buffer, expected)
            checks.round_trip(buffer, expected)

    run_ranks(64, work)


def test_every_case_of_four_ranks_on_one_buffer() -> None:
    chosen = [expect(case) for case in cases_of(4)]

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=30) as buffer:
            for expected in chosen * 2:
                checks.round_trip(buffer, expected)

    run_ranks(4, work)
