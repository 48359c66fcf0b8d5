"""The wheel installs into a new virtual environment and works there, away from this source tree."""

import os
import pathlib
import subprocess
import sys
import venv

import pytest


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The interpreter of a new environment that holds the wheel, and sees its dependencies."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    interpreter = home / "bin" / "python"
    # The locked wheels that this test was given, in place of a second download of torch.
    dependencies = [os.path.abspath(entry) for entry in sys.path if entry.endswith("/site")]
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    wheel = os.path.abspath(os.environ["DEEPEP_WHEEL"])
    # The environment that tests run in holds no pip; its base interpreter does.
    version = ".".join(map(str, sys.version_info[:2]))
    base = os.path.join(sys.base_prefix, "bin", f"python{version}")
    options = ["--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check"]
    run([base, "-m", "pip", "--python", str(interpreter), "install", *options, wheel], cwd=home)
    return interpreter


def run(command: list[str], cwd: pathlib.Path) -> str:
    """Runs a command outside the source tree, without Bazel's module path; returns what it said."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{' '.join(command)} exited {done.returncode}:\n{done.stdout}"
    return done.stdout


def test_imports_from_the_environment(python: pathlib.Path, tmp_path: pathlib.Path) -> None:
    where = run([str(python), "-c", "import deepep; print(deepep.__file__)"], tmp_path)
    assert pathlib.Path(where.strip()).is_relative_to(python.parent.parent)


def test_frameworks_find_deep_ep(python: pathlib.Path, tmp_path: pathlib.Path) -> None:
    code = (
        "import deep_ep, deep_ep.utils;"
        "buffer = deep_ep.Buffer(None, 0, 0, explicitly_destroy=True, device='cpu');"
        "assert buffer.runtime.is_available()"
    )
    run([str(python), "-c", code], tmp_path)


def test_metadata_names_what_it_requires(python: pathlib.Path, tmp_path: pathlib.Path) -> None:
    code = (
        "import deepep, importlib.metadata as m;"
        "assert m.version('deepep') == deepep.__version__, m.version('deepep');"
        "print(*m.requires('deepep'))"
    )
    assert "torch>=2.1" in run([str(python), "-c", code], tmp_path).split()


def test_quickstart_passes(python: pathlib.Path, tmp_path: pathlib.Path) -> None:
    print(run([str(python), "-m", "deepep.quickstart", "--steps", "2"], tmp_path))
