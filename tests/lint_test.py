"""All Python files pass ruff, with the settings of pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest

# The tree itself, not Bazel's links to a part of it.
ROOT = Path(__file__).resolve().parent.parent
LINT, FORMAT = ["check"], ["format", "--check"]


def ruff(*words: str, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ruff", words[0], "--no-cache", *words[1:]],
        cwd=where,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("command", [LINT, FORMAT], ids=" ".join)
def test_ruff_finds_nothing(command: list[str]) -> None:
    assert (ROOT / "WORKSPACE").is_file(), f"{ROOT} is not the whole tree"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.pyi"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.split()
    done = ruff(*command, *(name for name in files if (ROOT / name).exists()))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        (LINT, "import os\n", "F401"),
        (FORMAT, "x = {'a':1}\n", "would be reformatted"),
    ],
)
def test_a_violation_is_seen(command: list[str], text: str, words: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(text)
    done = ruff(*command, "--config", str(ROOT / "pyproject.toml"), str(planted))
    assert done.returncode == 1 and words in done.stdout
