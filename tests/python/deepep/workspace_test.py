"""The size of a low-latency workspace: the same in Python and in the kernels, and bounded."""

import pytest
from deepep import Buffer, _runtime, topology, workspace

SHAPES = [
    (128, 7168, 8, 288),
    (128, 7168, 8, 256),
    (64, 4096, 16, 128),
    (16, 5120, 3, 256),
    (1, 16, 1, 1),
    (0, 2880, 7, 30),
    (1024, 2880, 64, 8192),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_python_and_the_kernels_agree(shape: tuple[int, int, int, int]) -> None:
    assert workspace.low_latency_bytes(*shape) == _runtime.low_latency_workspace_hint(*shape)
    assert Buffer.get_low_latency_rdma_size_hint(*shape) == workspace.low_latency_bytes(*shape)


def test_limits_are_those_of_the_abi() -> None:
    assert workspace.MAX_EXPERTS == _runtime.MAX_LOW_LATENCY_EXPERTS
    assert workspace.MAX_ROWS == _runtime.MAX_LOW_LATENCY_ROWS
    assert workspace.MAX_TOPK == _runtime.MAX_TOPK
    assert topology.MAX_RANKS_PER_DOMAIN == _runtime.MAX_RANKS


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_no_tokens_leave_the_cells(ranks: int) -> None:
    assert workspace.low_latency_bytes(0, 64, ranks, 8) == workspace.cells_bytes(ranks)


def test_sizes_of_64_bits_do_not_overflow() -> None:
    size = workspace.low_latency_bytes(262_000, 1 << 20, 64, 8192)
    assert size > 1 << 40 and size == _runtime.low_latency_workspace_hint(
        262_000, 1 << 20, 64, 8192
    )


@pytest.mark.parametrize(
    "shape, words",
    [
        ((128, 0, 8, 64), "hidden is 0"),
        ((128, 64, 0, 64), "num_ranks is 0"),
        ((128, 64, 8, 0), "num_experts is 0.*1 to 8192"),
        ((128, 64, 8, 8193), "num_experts is 8193.*1 to 8192"),
        ((-1, 64, 8, 64), "num_max_dispatch_tokens_per_rank is -1"),
        ((2_097_152, 64, 8, 64), "num_max_dispatch_tokens_per_rank is 2097152.*0 to 2097151"),
    ],
)
def test_impossible_shapes_are_refused(shape: tuple[int, int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        workspace.low_latency_bytes(*shape)
