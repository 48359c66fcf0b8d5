"""Checks, by Bazel's own execution log, that a change rebuilds what depends on it and nothing else.

    python3 tools/check_incremental.py [bazel option]...

Works on a copy of the tracked files, in an output base of its own. Bazel cannot run inside a Bazel
test, so this is a script; .ci/run calls it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parent.parent
_ROWS = [f"intranode_host_h{hidden}_bf16_r2" for hidden in (16, 32, 48, 64)]
_TEMPLATE = "codegen/templates/intranode/dispatch.cu.j2"


def spawned(log: str) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yields (entry, outputs) of an execution log, which is one JSON object after another."""
    decoder = json.JSONDecoder()
    while log := log.lstrip():
        entry, end = decoder.raw_decode(log)
        log = log[end:]
        yield entry, list(entry.get("listedOutputs", []))


class Copy:
    """A copy of the tree that can be changed and built."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        self.tree = folder / "tree"
        self._log = folder / "log.json"
        self._table = folder / "own.bzl"
        self._base = f"--output_base={folder / 'base'}"
        self._options = [*options, f"--disk_cache={folder / 'cache'}"]
        command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
        listed = subprocess.check_output(command, cwd=TREE, text=True)
        for name in filter(None, listed.split("\0")):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            if (TREE / name).is_file():
                shutil.copy2(TREE / name, self.tree / name)

    def own_table(self, rows: list[str]) -> None:
        """Writes the user's table."""
        self._table.write_text(f"VARIANTS = {json.dumps(rows)}\n")

    def bazel(self, *arguments: str) -> None:
        """Runs Bazel on the copy; raises CalledProcessError when it fails."""
        environment = dict(os.environ, DEEPEP_VARIANTS=str(self._table))
        command = [str(self.tree / "bazelw"), self._base, *arguments]
        subprocess.run(command, cwd=self.tree, env=environment, check=True)

    def build(self) -> list[str]:
        """Builds the own set; the outputs that were made, and not taken from a cache."""
        log = f"--execution_log_json_file={self._log}"
        self.bazel("build", "--kernels=own", *self._options, log, "//kernels:libraries")
        return [
            output
            for entry, outputs in spawned(self._log.read_text())
            if not entry.get("remoteCacheHit") and "cache hit" not in entry.get("runner", "")
            for output in outputs
        ]


def require(what: str, made: list[str], unexpected: list[str]) -> None:
    """Prints what a change rebuilt; exits when there is more, or nothing."""
    if unexpected or not made:
        print(f"{what}: {len(made)} outputs, not expected: {unexpected}", file=sys.stderr)
        sys.exit(1)
    print(f"{what}: {len(made)} outputs, each expected")


def foreign(made: list[str], row: str) -> list[str]:
    """Outputs that are neither a row's own nor the manifest of all."""
    return [name for name in made if row not in name and not name.endswith("manifest.json")]


def check(copy: Copy) -> None:
    """Makes the changes, one after the other."""
    copy.own_table(_ROWS[:2])
    copy.build()

    copy.own_table(_ROWS[:3])
    made = copy.build()
    require("a new row in one's own table", made, foreign(made, _ROWS[2]))

    table = copy.tree / "kernels" / "variants.bzl"
    table.write_text(table.read_text().replace("EXTRA = [", f'EXTRA = ["{_ROWS[3]}",', 1))
    copy.own_table(_ROWS)
    made = copy.build()
    require("a new row in the repository's table", made, foreign(made, _ROWS[3]))

    template = copy.tree / _TEMPLATE
    block = "{% block kernel %}\n"
    template.write_text(
        template.read_text().replace(block, block + "// As every rendering shows.\n")
    )
    made = copy.build()
    whole = (".so", "/manifest.json", "/dispatch.cc", "/dispatch.o")
    require("an edited template", made, [name for name in made if not name.endswith(whole)])

    copy.bazel("clean")
    made = copy.build()
    if made:
        require("an empty output folder and a disk cache", made, made)
    print("an empty output folder and a disk cache: 0 outputs, all from the cache")


def main(options: list[str]) -> int:
    folder = Path(tempfile.mkdtemp())
    try:
        copy = Copy(folder, options)
        try:
            check(copy)
        finally:
            copy.bazel("shutdown")
    except subprocess.CalledProcessError as error:
        print(f"check_incremental: {error}", file=sys.stderr)
        return 1
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(folder)], check=False)
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
