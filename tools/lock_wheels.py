#!/usr/bin/env python3
"""Resolve third_party/{python,cuda}/requirements.txt into lock.bzl beside them.

Run it after editing a requirements.txt; needs pip 23 or newer and a package index:

    python3 tools/lock_wheels.py

pip resolves for each supported Python and reports the files it would take. The lock keeps their
versions, the SHA-256 of each of those files, and who requires whom. Nothing is downloaded that
pip does not need for its report.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent / "third_party"
PYTHONS = ("3.11", "3.12", "3.13")

# torch names these, but imports without them: build helpers and the compiler of torch.compile.
OMITTED = {"cuda_bindings", "cuda_pathfinder", "cuda_toolkit", "setuptools", "triton"}


def canonical(name: str) -> str:
    """The name as a Bazel repository spells it: lower case, '_' for '-' and '.'."""
    return re.sub(r"[-_.]+", "_", name).lower()


@dataclasses.dataclass
class Entry:
    """One locked distribution."""

    dist: str
    version: str
    hashes: set[str] = dataclasses.field(default_factory=set)
    local_hashes: set[str] = dataclasses.field(default_factory=set)
    requires: set[str] = dataclasses.field(default_factory=set)
    bundle: list[str] = dataclasses.field(default_factory=list)

    def pinned(self) -> str:
        """The entry as a line of a requirements file with hashes."""
        hashes = "".join(f" --hash=sha256:{digest}" for digest in sorted(self.hashes))
        return f"{self.dist}=={self.version}{hashes}"


def pip_report(requirements: list[str], *options: str, index: bool = True) -> list[dict[str, Any]]:
    """What pip would install: from the index, or else from this machine's find-links only."""
    environ = dict(os.environ)
    if index:
        # A machine may prefer builds of its own; the lock is about what everybody can fetch.
        environ.update(PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += [
            "--ignore-installed",
            "--only-binary=:all:",
            "--target",
            folder,
            "--report",
            str(report),
        ]
        if not index:
            command += ["--no-index", "--no-deps"]
        subprocess.run([*command, *options, *requirements], check=True, env=environ)
        installs: list[dict[str, Any]] = json.loads(report.read_text())["install"]
        return installs


def required_names(metadata: dict[str, Any], resolved: set[str]) -> Iterator[str]:
    """Names among `resolved` that a distribution requires without an extra."""
    for line in metadata.get("requires_dist", []):
        name = canonical(re.match(r"[A-Za-z0-9._-]+", line)[0])  # type: ignore[index]
        if name in resolved and "extra ==" not in line:
            yield name


def lock(requirements: list[str], *options: str) -> dict[str, Entry]:
    """Resolves for every supported Python; the first one decides the versions."""
    entries: dict[str, Entry] = {}
    for python in PYTHONS:
        report = pip_report(requirements, "--python-version", python, *options)
        resolved = {canonical(item["metadata"]["name"]) for item in report} - OMITTED
        for item in report:
            metadata = item["metadata"]
            name = canonical(metadata["name"])
            if name in OMITTED:
                continue
            entry = entries.setdefault(name, Entry(name.replace("_", "-"), metadata["version"]))
            entry.hashes.add(item["download_info"]["archive_info"]["hashes"]["sha256"])
            entry.requires.update(required_names(metadata, resolved))
        # The next Python gets the same versions, of what is required through extras as well.
        requirements = [f"{e.dist}=={e.version}" for e in entries.values()]
    return entries


def bundle_cuda_of_torch(entries: dict[str, Entry]) -> None:
    """Moves the CUDA libraries that the index's torch needs into torch's own entry.

    They are installed beside torch, and only with that build: a machine whose pip configuration
    offers a CPU build of the same version (its hash goes to local_hashes) needs none of them.
    """
    torch = entries["torch"]
    cuda = sorted(name for name in entries if name.startswith("nvidia_"))
    torch.bundle = [entries.pop(name).pinned() for name in cuda]
    for entry in entries.values():
        entry.requires -= set(cuda)
    for python in PYTHONS:
        try:
            pin = f"torch=={torch.version}"
            report = pip_report([pin], "--python-version", python, index=False)
        except subprocess.CalledProcessError:
            print(f"no local build of torch {torch.version} for Python {python}", file=sys.stderr)
            continue
        digest = report[0]["download_info"]["archive_info"]["hashes"]["sha256"]
        torch.local_hashes.update({digest} - torch.hashes)


def write_lock(path: pathlib.Path, variable: str, entries: dict[str, Entry]) -> None:
    """Writes the entries as a Starlark dictionary, in the layout that buildifier keeps."""
    lines = ['"""Locked wheels. Written by tools/lock_wheels.py; do not edit."""', ""]
    lines += [f"{variable} = {{"]
    for name, entry in sorted(entries.items()):
        lines += [f'    "{name}": {{']
        for field in ("dist", "version"):
            lines += [f'        "{field}": "{getattr(entry, field)}",']
        for field in ("hashes", "local_hashes", "requires", "bundle"):
            values = sorted(getattr(entry, field))
            if values:
                lines += [f'        "{field}": [']
                lines += [f'            "{value}",' for value in values]
                lines += ["        ],"]
        lines += ["    },"]
    path.write_text("\n".join([*lines, "}", ""]))


def requirements_of(folder: str) -> list[str]:
    lines = (ROOT / folder / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def main() -> None:
    wheels = lock(requirements_of("python"))
    bundle_cuda_of_torch(wheels)
    write_lock(ROOT / "python" / "lock.bzl", "WHEELS", wheels)
    cuda = lock(requirements_of("cuda"), "--no-deps")
    write_lock(ROOT / "cuda" / "lock.bzl", "CUDA_WHEELS", cuda)


if __name__ == "__main__":
    main()
