"""Builds variants with Bazel, loads each library and says how large it came out.

Used by tools/gen_variants.py, which runs under `bazel run`: Bazel itself is free again by then.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from codegen import resources
from codegen.table import read_sets
from codegen.variant import Variant

OWN_TABLE = "DEEPEP_VARIANTS"  # Names a user's table; read by tools/build/own_variants.bzl.
_RUNTIME = "//python:deepep/_runtime.so"


def names_of_set(table: Path, chosen: str) -> list[str]:
    """The names in one of the table's sets."""
    return [variant.name for variant in read_sets(table)[chosen]]


def _prefix(own: Path | None) -> str:
    return f"{OWN_TABLE}={shlex.quote(str(own.resolve()))} " if own else ""


def build_command(names: Sequence[str], own: Path | None) -> str:
    """The command that builds the libraries alone."""
    return f"{_prefix(own)}./bazelw build {' '.join(f'//kernels:{name}' for name in names)}"


def package_command(rows: Sequence[Variant], own: Path | None) -> str:
    """The command that builds a wheel with them in it."""
    host_only = all(variant.is_host for variant in rows)
    chosen = "own" if own else "default" if host_only else "gpu"
    return f"{_prefix(own)}./bazelw build --kernels={chosen} //python:wheel"


def _bazel(tree: Path, arguments: Sequence[str], own: Path | None) -> str:
    """Runs Bazel in the source tree and returns its output; its messages go to the terminal."""
    environment = dict(os.environ)
    if own:
        environment[OWN_TABLE] = str(own.resolve())
    command = [str(tree / "bazelw"), *arguments]
    done = subprocess.run(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def build(rows: Sequence[Variant], own: Path | None, tree: Path) -> int:
    """Builds the libraries and the runtime that loads them; prints a line for each library."""
    try:
        targets = [variant.bazel_target for variant in rows]
        _bazel(tree, ["build", "--output_groups=+resources", *targets, _RUNTIME], own)
        output = Path(_bazel(tree, ["info", "bazel-bin"], own))
    except subprocess.CalledProcessError as error:
        print(f"gen_variants: Bazel stopped with exit code {error.returncode}", file=sys.stderr)
        return 1
    runtime = load_runtime(output / "python" / "deepep" / "_runtime.so")
    return report(rows, output / "kernels", runtime)


def load_runtime(path: Path) -> Any:
    """The runtime's Python module, from its file."""
    spec = importlib.util.spec_from_file_location("_runtime", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differences(variant: Variant, facts: Mapping[str, Any]) -> list[str]:
    """What a loaded library says of itself that its name does not say."""
    named = ("name", "topology", "arch", "dtype", "hidden", "num_ranks", "num_nodes")
    return [
        f"{fact} is {facts[fact]!r}, not {getattr(variant, fact)!r}"
        for fact in named
        if facts[fact] != getattr(variant, fact)
    ]


def kernels(variant: Variant, folder: Path) -> list[str]:
    """A line for each GPU kernel: what the compiler says that it takes."""
    reports = (folder / variant.name / f"{unit}.o.resources.txt" for unit in variant.units)
    return [
        f"  {row['unit']} {row['kernel']}: {row['registers']} registers, "
        f"{row['shared_bytes']} bytes of shared memory, "
        f"{row['spill_store_bytes'] + row['spill_load_bytes']} bytes spilled"
        for row in resources.read(path for path in reports if path.exists())
    ]


def report(rows: Sequence[Variant], folder: Path, runtime: Any) -> int:
    """Loads each library; prints its size and its kernels, or what is wrong with it.

    Returns the exit code.
    """
    failed = 0
    for variant in rows:
        path = folder / variant.library
        try:
            wrong = "; ".join(differences(variant, runtime.Library(str(path)).facts))
        except (RuntimeError, OSError) as error:
            wrong = str(error)
        failed += bool(wrong)
        size = f"{path.stat().st_size / 1024:.0f} KiB" if path.exists() else "missing"
        print(f"{variant.name}: {size}, {wrong or 'loads'}")
        for line in kernels(variant, folder):
            print(line)
    return 1 if failed else 0
