"""tools/install.sh builds for the interpreter that it installs into, and says what is missing.

Bazel, pip, apt-get and Python are stand-ins that write down how they were called.
"""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "install.sh"
WHEEL = "bazel-bin/python/deepep-0.1.0-cp311-linux_x86_64.whl"

BAZELW = """#!/bin/bash
echo "bazelw $* with $DEEPEP_PYTHON" >>"$LOG"
[ -z "{build}" ] || exit 1
touch "{wheel}"
"""
# Answers the script's questions; a copy of it is the interpreter of the environments that it makes.
PYTHON = """#!/bin/bash
case "$*" in
  *version_info*) exit {old} ;;
  *"import ensurepip, venv"*) [ -e "$LOG.apt" ] || exit {no_venv} ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "venv $3" >>"$LOG" ;;
  *"pip --version"*) exit {no_pip} ;;
  *_base_executable*) echo /base/python ;;
  *"pip install"*) echo "$0 $*" >>"$LOG"; exit {no_install} ;;
  *"import deepep"*) echo "0.1.0 with 9 kernel libraries, in $PWD"; exit {no_import} ;;
  *) exit 9 ;;
esac
"""
APT = """#!/bin/bash
echo "apt-get $*" >>"$LOG"
touch "$LOG.apt"
{brings}
"""
SYSTEM = ("bash", "cat", "cp", "dirname", "env", "mkdir", "rm", "touch")


def python(**troubles: int) -> str:
    names = ("old", "no_venv", "no_pip", "no_install", "no_import")
    return PYTHON.format(**(dict.fromkeys(names, 0) | troubles))


class Done(NamedTuple):
    status: int
    words: str
    log: list[str]


class Machine:
    """A machine that has these programs and no others, with a copy of the script in a tree."""

    def __init__(self, folder: Path, **programs: str) -> None:
        self.root, self.programs = folder / "tree", folder / "bin"
        self.log = folder / "log"
        (self.root / WHEEL).parent.mkdir(parents=True)
        (self.root / "tools").mkdir()
        shutil.copy(SCRIPT, self.root / "tools")
        self.programs.mkdir()
        for name in SYSTEM:
            found = shutil.which(name)
            assert found
            (self.programs / name).symlink_to(found)
        self.put("id", "#!/bin/bash\necho 0\n")
        for name, text in programs.items():
            self.put(name.replace("_", "."), text)
        self.fails_to_build(False)

    def put(self, name: str, text: str) -> Path:
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def fails_to_build(self, fails: bool) -> None:
        launcher = self.root / "bazelw"
        launcher.write_text(BAZELW.format(build="fails" if fails else "", wheel=WHEEL))
        launcher.chmod(0o755)

    def install(self, *arguments: str, **environ: str) -> Done:
        """Runs the script from the folder that holds the tree."""
        done = subprocess.run(
            [self.programs / "bash", self.root / "tools" / "install.sh", *arguments],
            cwd=self.root.parent,
            env={"PATH": str(self.programs), "LOG": str(self.log), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return Done(done.returncode, done.stdout, lines)


def expected(target: Path | str, kernels: str = "default", options: str = "") -> list[str]:
    pip = f"{target} -m pip install --quiet"
    return [
        f"bazelw build --kernels={kernels} //python:wheel with /base/python",
        f"{pip} --force-reinstall --no-deps {WHEEL}",
        f"{pip} {options}{WHEEL}",
    ]


def test_without_a_word_it_goes_into_an_environment_in_the_tree(tmp_path: Path) -> None:
    machine = Machine(tmp_path, python3=python())
    for _ in range(2):  # the second time the environment is there
        done = machine.install()
        assert done.status == 0, done.words
    home = machine.root / ".venv"
    once = expected(home / "bin/python")
    assert done.log == [f"venv {home}", *once, *once]
    assert f"install: deepep 0.1.0 with 9 kernel libraries, in / is in {home}" in done.words


def test_places_are_those_that_were_asked_for(tmp_path: Path) -> None:
    machine = Machine(tmp_path, python3=python())
    options = ["--kernels", "gpu", "--", "--index-url", "mine"]
    done = machine.install("--venv", "here", *options)
    assert (done.status, done.log) == (
        0,
        [
            f"venv {tmp_path}/here",
            *expected(tmp_path / "here/bin/python", "gpu", "--index-url mine "),
        ],
    ), done.words
    machine.log.unlink()
    assert machine.install(VIRTUAL_ENV=str(tmp_path / "here")).log == expected(
        tmp_path / "here/bin/python"
    )
    machine.log.unlink()
    assert machine.install("--python", "bin/python3").log == expected(tmp_path / "bin/python3")


def test_the_lowest_supported_python_makes_the_environment(tmp_path: Path) -> None:
    machine = Machine(tmp_path, python3=python(old=1), python3_12=python())
    assert machine.install().status == 0


def test_a_wheel_of_another_version_is_not_taken(tmp_path: Path) -> None:
    machine = Machine(tmp_path, python3=python())
    (machine.root / WHEEL.replace("0.1.0", "0.0.9")).touch()
    done = machine.install()
    assert done.log[1:] == expected(machine.root / ".venv/bin/python"), done.words


def test_what_is_missing_is_installed(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.write_text(python())
    made.chmod(0o755)
    brings = f'cp "{made}" "{tmp_path}/bin/python3"'
    bare = Machine(tmp_path, **{"apt-get": APT.format(brings=brings)})
    done = bare.install()
    assert done.status == 0 and "no Python 3.11 to 3.13; installing python3" in done.words
    assert done.log[:2] == [
        "apt-get update -qq",
        "apt-get install -y -qq --no-install-recommends python3 python3-venv",
    ]


def test_a_python_without_venv_gets_its_package(tmp_path: Path) -> None:
    programs = {"python3_12": python(no_venv=1), "apt-get": APT.format(brings="")}
    done = Machine(tmp_path, **programs).install()
    assert done.status == 0, done.words
    assert done.log[1].endswith(" python3.12-venv")


@pytest.mark.parametrize(
    ("trouble", "arguments", "words"),
    [
        ({"old": 1}, [], "no Python 3.11 to 3.13, and there is no apt-get; please install: pyth"),
        ({"no_venv": 1}, [], "python3 cannot make virtual environments, and there is no apt-get"),
        ({"no_pip": 1}, ["--python", "python3"], "python3 has no pip; run 'python3 -m ensurepip'"),
        ({"old": 1}, ["--python", "python3"], "python3 is no Python 3.11 to 3.13 that runs"),
        ({}, ["--python", "none"], "none is no Python 3.11 to 3.13 that runs"),
        ({"no_install": 1}, [], f"pip could not install {WHEEL}"),
        ({"no_import": 1}, [], "cannot be imported"),
    ],
)
def test_what_fails_is_said(
    trouble: dict[str, int], arguments: list[str], words: str, tmp_path: Path
) -> None:
    done = Machine(tmp_path, python3=python(**trouble)).install(*arguments)
    assert done.status == 1 and words in done.words, done.words
    assert "install: deepep 0.1.0" not in done.words


def test_a_failed_build_installs_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, python3=python())
    machine.fails_to_build(True)
    done = machine.install()
    assert done.status == 1 and "install: the wheel could not be built" in done.words
    assert not any("pip" in line for line in done.log)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kernels", "all"], "--kernels is all, but must be default, gpu, catalog or own"),
        (["--venv"], "--venv needs a value"),
        (["--venv", "a", "--python", "b"], "--venv and --python exclude each other"),
        (["wheel"], "wheel is no option; see --help"),
    ],
)
def test_a_wrong_option_changes_nothing(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = Machine(tmp_path, python3=python()).install(*arguments)
    assert done.status == 2 and words in done.words and done.log == []


def test_help_names_every_option(tmp_path: Path) -> None:
    script = SCRIPT.read_text(encoding="utf-8")
    done = Machine(tmp_path).install("--help")
    assert done.status == 0 and done.log == []
    for option in ("--venv", "--python", "--kernels", "--help"):
        assert option in done.words and script.count(option) > 1


def test_it_takes_the_interpreters_that_bazel_takes() -> None:
    launcher = (SCRIPT.parents[1] / "bazelw").read_text(encoding="utf-8")
    script = SCRIPT.read_text(encoding="utf-8")
    for line in launcher.splitlines():
        if line.startswith("candidates=("):
            assert line in script
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in script
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in launcher
