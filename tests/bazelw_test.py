"""./bazelw looks at the interpreter that Bazel will take, and installs what that one lacks."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAUNCHER, RULES = ROOT / "bazelw", ROOT / "tools" / "build" / "python.bzl"

# A Python that answers the three questions of bazelw.
PYTHON = """#!/bin/sh
case "$*" in
  *version_info*) exit {unsupported} ;;
  *"-m pip"*) exit {no_pip} ;;
  *Python.h*) exit {no_headers} ;;
esac
exit 9
"""
BAZEL = """#!/bin/sh
echo "bazel $*"
"""


def python(supported: bool = True, pip: bool = True, headers: bool = True) -> str:
    return PYTHON.format(
        unsupported=int(not supported), no_pip=int(not pip), no_headers=int(not headers)
    )


def run(folder: Path, programs: dict[str, str], chosen: str = "") -> str:
    """What bazelw does on a machine that has these programs and no others."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("dirname", "env"):
        found = shutil.which(name)
        assert found
        (tools / name).symlink_to(found)
    for name, text in {"bazelisk": BAZEL, "g++": BAZEL, **programs}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environ = {"PATH": str(tools), **({"DEEPEP_PYTHON": chosen} if chosen else {})}
    shell = shutil.which("bash") or "/bin/bash"
    done = subprocess.run(
        [shell, str(LAUNCHER), "info"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout


BARE = python(pip=False, headers=False)
CASES = {
    "nothing is missing": ({"python3": python()}, "", set()),
    "a numbered one comes first": ({"python3.12": python(), "python3": BARE}, "", set()),
    "the lowest number comes first": (
        {"python3.11": python(headers=False), "python3.13": python()},
        "",
        {"python3.11-dev"},
    ),
    "an old python3 is passed over": (
        {"python3.13": python(headers=False), "python3": python(supported=False)},
        "",
        {"python3.13-dev"},
    ),
    "python3 lacks both": ({"python3": BARE}, "", {"python3-pip", "python3-dev"}),
    "the chosen one counts": ({"python3.11": BARE, "mine": python()}, "mine", set()),
}


@pytest.mark.parametrize(("programs", "chosen", "missing"), CASES.values(), ids=CASES.keys())
def test_what_is_installed(
    programs: dict[str, str], chosen: str, missing: set[str], tmp_path: Path
) -> None:
    words = run(tmp_path, programs, chosen)
    assert words.endswith("bazel info\n") == (not missing)
    told = re.search(r"please install: (.*)", words)
    assert set(told[1].split() if told else []) == missing, words


def test_both_sides_look_for_the_same() -> None:
    rules = RULES.read_text(encoding="utf-8")
    listed = re.search(r"^_SUPPORTED = \[(.*)\]$", rules, re.MULTILINE)
    tried = re.search(r"^candidates=\((.*)\)$", LAUNCHER.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed and tried
    numbers = re.findall(r'"(3\.\d+)"', listed[1])
    assert tried[1].split() == [*(f"python{number}" for number in numbers), "python3"]
    low, high = (tuple(map(int, numbers[at].split("."))) for at in (0, -1))
    assert f"{low} <= sys.version_info[:2] <= {high}" in LAUNCHER.read_text(encoding="utf-8")
