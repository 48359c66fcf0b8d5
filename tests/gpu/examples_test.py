"""The examples on a GPU: their steps as CUDA graphs equal the model in one piece."""

import pytest

from examples import decode, train
from tests.gpu.ranks import ARCHS, Rank, on_ranks

# They take the best architecture that is built.
BEST = ARCHS[:1]


def check(error: float, tolerance: float) -> None:
    if not error <= tolerance:
        pytest.fail(f"largest difference {error:.1e} of {tolerance:.1e}")


@on_ranks(counts=(1, 2, 8), choices=["eager", "graph"], archs=BEST)
def test_a_training_step_of_normal_mode(rank: Rank, how: str) -> None:
    """Forward, backward and update, with tokens that go to other experts in every replay."""
    settings = train.Settings(rank.size, device="cuda", graph=how == "graph")
    result = train.run(rank.group, settings)
    check(result["error"], train.TOLERANCE)
    assert result["losses"][-1] < result["losses"][0]


@on_ranks(counts=(1, 2, 8), choices=["bf16", "fp8"], archs=BEST)
def test_a_captured_step_of_decoding(rank: Rank, rows: str) -> None:
    settings = decode.Settings(rank.size, device="cuda", fp8=rows == "fp8", graph=True)
    check(decode.run(rank.group, settings)["error"], decode.TOLERANCE)
