"""Low-latency dispatch and combine on `host`, ranks as threads: any shape, world and mode."""

from __future__ import annotations

import pytest
from deepep import Buffer
from deepep.testing import ThreadGroup, run_ranks

from tests.distributed.low_latency_cases import MODES, SHAPES, Shape, check_round


def rounds(group: ThreadGroup, shapes: list[Shape], count: int, shrink: bool) -> None:
    size = max(
        Buffer.get_low_latency_rdma_size_hint(s.max_tokens, s.hidden, group.size(), s.experts)
        for s in shapes
    )
    with Buffer(
        group, 0, size, low_latency_mode=True, enable_shrink=shrink, timeout=30, device="cpu"
    ) as buffer:
        for seed in range(count):
            check_round(buffer, shapes[seed % len(shapes)], seed)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8, 12, 16])
def test_every_mode_in_every_world(num_ranks: int) -> None:
    for shape in MODES:
        run_ranks(num_ranks, rounds, [shape], 4, False)


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_any_shape(shape: Shape, num_ranks: int) -> None:
    run_ranks(num_ranks, rounds, [shape], 4, False)


@pytest.mark.parametrize("shape", MODES, ids=[shape.name for shape in MODES])
def test_a_buffer_that_may_shrink_gives_the_same_results(shape: Shape) -> None:
    run_ranks(3, rounds, [shape], 4, True)


def test_shapes_and_modes_follow_each_other_on_one_buffer_without_a_clean_up() -> None:
    caps = (1, 2, 4, 8, 44)
    mixed = [
        MODES[i % len(MODES)].but(hidden=(256, 512, 272)[i % 3], max_tokens=cap, tokens=cap)
        for i, cap in enumerate(caps * 24)
    ]
    run_ranks(4, rounds, mixed, len(mixed), False, timeout=120)
