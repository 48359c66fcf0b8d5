"""Puts the built package into a folder, for machines that have no Bazel.

    ./bazelw run --kernels=gpu //tools:pack -- --out DIR
    PYTHONPATH=DIR python -c 'import deepep'

The folder DIR/deepep is replaced. It serves the Python that built it (DEEPEP_PYTHON chooses one);
the wheel's name says which.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

PACKAGE = "deepep"


def built_wheel() -> Path:
    """The wheel that Bazel gave to this program. Raises FileNotFoundError without Bazel."""
    here = Path(__file__).parent.parent / "python"
    found = sorted(here.glob(f"{PACKAGE}-*.whl"))
    if len(found) != 1:
        raise FileNotFoundError(
            f"{len(found)} wheels in {here}, there must be one: start this by ./bazelw run "
            "//tools:pack, or name a wheel with --wheel."
        )
    return found[0]


def unpack(wheel: Path, folder: Path) -> list[str]:
    """Replaces folder/deepep by the wheel's; returns the variants in it."""
    shutil.rmtree(folder / PACKAGE, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(f"{PACKAGE}/"):
                archive.extract(name, folder)
    manifest = json.loads((folder / PACKAGE / "lib" / "manifest.json").read_text())
    return [entry["name"] for entry in manifest["variants"]]


def main(argv: Sequence[str]) -> int:
    values: Any = flags.FLAGS
    folder, wheel = values["out"].value, values["wheel"].value
    if not folder:
        print("pack: --out DIR is missing: where should the package be put?", file=sys.stderr)
        return 2
    try:
        wheel = Path(wheel) if wheel else built_wheel()
        variants = unpack(wheel, Path(folder))
    except (OSError, zipfile.BadZipFile) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    files = [path for path in Path(folder, PACKAGE).rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    print(f"{wheel.name}: {len(files)} files, {total / 1e6:.1f} MB, variants:")
    print("\n".join(f"  {name}" for name in variants))
    return 0


if __name__ == "__main__":
    # Bazel starts it elsewhere; paths in flags count from where Bazel was called.
    os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    flags.DEFINE_string("out", None, "folder that the package's folder is put into")
    flags.DEFINE_string("wheel", None, "wheel to unpack; by default the one just built")
    app.run(main)
