"""Low-latency dispatch and combine on `host`, ranks as threads: any shape, world and mode."""

from __future__ import annotations

import pytest
from deepep import Buffer
from deepep.testing import ThreadGroup, run_ranks

from tests.distributed.low_latency_cases import Shape, check_round

BASE = Shape(tokens=9, max_tokens=12, hidden=272, topk=3, experts=10)

MODES = [
    BASE,
    BASE.but(cast="bf16"),
    BASE.but(cast="rounded"),
    BASE.but(cast="ue8m0"),
    BASE.but(cast="given"),
    BASE.but(rows="exported"),
    BASE.but(rows="zero_copy"),
    BASE.but(hook=True),
    BASE.but(hook=True, cast="bf16"),
    BASE.but(hook=True, cast="ue8m0"),
    BASE.but(hook=True, cast="given", rows="exported"),
    BASE.but(hook=True, rows="zero_copy"),
    BASE.but(logfmt=True),
    BASE.but(logfmt=True, hook=True, hidden=2880),
]

SHAPES = [
    BASE.but(tokens=1, max_tokens=1),
    BASE.but(tokens=0, max_tokens=0),
    BASE.but(tokens=40, max_tokens=64, topk=8, experts=64),
    BASE.but(hidden=16, cast="fp8"),
    BASE.but(hidden=8, cast="bf16", rows="exported"),
    BASE.but(hidden=2880),
    BASE.but(hidden=2880, cast="ue8m0", hook=True),
    BASE.but(hidden=7168, tokens=3, max_tokens=4),
    BASE.but(topk=32, experts=33, tokens=5),
    BASE.but(topk=1, experts=1),
    BASE.but(topk=2, experts=3, hook=True),
    BASE.but(topk=16, experts=896, tokens=4),
]


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
