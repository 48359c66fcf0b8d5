"""The training example runs as its first lines say, and sees when the layer is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepep.nn import ExpertParallel
from deepep.testing import run_ranks
from torch import Tensor

from examples import train

ROOT = Path(__file__).resolve().parents[2]
SMALL = train.Settings(steps=3, tokens=5)


@pytest.mark.parametrize("flags", ["--ranks=2 --steps=5", "--ranks=3 --tokens=7 --steps=4"])
def test_it_trains_like_the_model_in_one_piece(flags: str) -> None:
    done = subprocess.run(
        [sys.executable, "examples/train.py", *flags.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"^rank \d: \d+ us a step; loss ([\d.]+) -> ([\d.]+)$", done.stdout, re.M)
    assert len(losses) == int(flags[8])
    assert "PASSED: largest difference from the model in one piece" in done.stdout


def errors() -> list[float]:
    return [result["error"] for result in run_ranks(2, train.run, SMALL)]


class NoResult(ExpertParallel):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0


class NoGradientOfRows(ExpertParallel):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach()) + x * 0


class HalfOfTheGradients(ExpertParallel):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out / 2 + out.detach() / 2


@pytest.mark.parametrize("wrong", [NoResult, NoGradientOfRows, HalfOfTheGradients])
def test_a_wrong_layer_is_seen(
    wrong: type[ExpertParallel], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(errors()) <= train.TOLERANCE
    monkeypatch.setattr(train, "ExpertParallel", wrong)
    assert min(errors()) > train.TOLERANCE


def test_tokens_of_each_step_go_to_other_experts() -> None:
    router = train.Router("cpu")
    chosen = [router(train.tokens_of(step, SMALL))[0] for step in range(SMALL.steps)]
    assert not torch.equal(chosen[0], chosen[1]) and not torch.equal(chosen[1], chosen[2])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--graph"], "--graph needs a GPU"),
        (["--ranks=17"], "--ranks 17: must be 1 to 16, an expert for each"),
    ],
)
def test_what_cannot_run_is_refused(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        train.main(flags)
    assert caught.value.code == 2 and text in capsys.readouterr().err
