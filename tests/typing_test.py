"""Everything that is Python here passes mypy --strict, with the settings of pyproject.toml."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


def test_mypy_finds_nothing(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml"]
    version = ".".join(map(str, sys.version_info[:2]))
    command += ["--python-version", version, "--cache-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, "codegen", "examples", "python/deep_ep", "python/deepep", "tools"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
