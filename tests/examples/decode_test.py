"""The decoding example runs as its first lines say, and sees when the layer is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepep.testing import run_ranks

from examples import decode

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "flags", ["--ranks=2 --steps=5", "--ranks=3 --fp8 --sequences=3", "--ranks=2 --compile --fp8"]
)
def test_it_decodes_like_the_model_in_one_piece(flags: str) -> None:
    done = subprocess.run(
        [sys.executable, "examples/decode.py", *flags.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^rank \d: \d+ us a step", done.stdout, re.MULTILINE)) == int(flags[8])
    assert "PASSED: largest difference from the model in one piece" in done.stdout


def test_a_layer_that_loses_its_experts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = decode.Settings(steps=2, sequences=3)
    assert all(result["error"] <= decode.TOLERANCE for result in run_ranks(2, decode.run, settings))
    monkeypatch.setattr(decode.Dense, "forward", lambda self, x: torch.zeros_like(x))
    assert all(result["error"] > decode.TOLERANCE for result in run_ranks(2, decode.run, settings))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--graph"], "--graph needs a GPU"),
        (["--device=cuda", "--graph", "--compile"], "exclude each other|torch sees no GPU"),
    ],
)
def test_what_cannot_run_is_refused(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        decode.main(flags)
    assert caught.value.code == 2 and re.search(text, capsys.readouterr().err)
