"""The manifest: one JSON row per library, with what the registry must know before it loads one.

Written once by the build, read by python/deepep/registry.py. Knows no build system.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from codegen import resources
from codegen.errors import CodegenError
from codegen.variant import Variant

FORMAT = 1  # Raised when a key changes its meaning or goes.
ABI_VERSION = 3  # DEEPEP_ABI_VERSION in kernels/abi/deepep_kernel.h; a test compares the two.


def row(
    variant: Variant,
    library: Path,
    sources: Iterable[Path] = (),
    toolchain: Mapping[str, str] | None = None,
    reports: Iterable[Path] = (),
) -> dict[str, Any]:
    """Return one variant's row; `sources` are all generated sources and headers it came from,
    `reports` what the compiler says of its kernels."""
    if library.name != variant.library:
        raise CodegenError(
            f"library of {variant.name} is {library.name}, but the registry looks for "
            f"{variant.library}; rename it, or give the variant that it was built from"
        )
    content = library.read_bytes()
    return {
        "name": variant.name,
        "topology": variant.topology,
        "arch": variant.arch,
        "hidden": variant.hidden,
        "dtype": variant.dtype,
        "num_ranks": variant.num_ranks,
        "num_nodes": variant.num_nodes,
        "library": variant.library,
        "library_bytes": len(content),
        "device_code_bytes": resources.section_bytes(library, resources.FATBIN_SECTION),
        "kernels": resources.read(reports),
        "sha256": hashlib.sha256(content).hexdigest(),
        "sources_sha256": sources_digest(sources),
        "toolchain": dict(sorted((toolchain or {}).items())),
    }


def sources_digest(sources: Iterable[Path]) -> str:
    """Return one digest of many files' contents, whatever their order, folders and names; empty
    for no files."""
    digests = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in sources)
    return hashlib.sha256("\n".join(digests).encode()).hexdigest() if digests else ""


def dumps(rows: Iterable[dict[str, Any]]) -> str:
    """Return the manifest's text: the same bytes for the same rows in any order."""
    variants = sorted(rows, key=lambda entry: str(entry["name"]))
    names = [entry["name"] for entry in variants]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise CodegenError(
            f"manifest has {', '.join(repeated)} more than once, but a variant has one library; "
            "give each NAME=LIBRARY once"
        )
    document = {"format": FORMAT, "abi_version": ABI_VERSION, "variants": variants}
    return json.dumps(document, indent=2) + "\n"


def pins(libraries: Mapping[str, Path], expected: Iterable[str] = ()) -> str:
    """Return a line `name@sha256` for each library, sorted.

    `expected` holds such lines for libraries that must not have changed.
    """
    lines = {
        f"{name}@{hashlib.sha256(library.read_bytes()).hexdigest()}"
        for name, library in libraries.items()
    }
    for pin in sorted(expected):
        if pin not in lines:
            name = pin.partition("@")[0]
            found = [line for line in lines if line.startswith(f"{name}@")]
            raise CodegenError(
                f"pin is {pin}, but the library came out as {', '.join(found) or 'none at all'}: "
                "its sources or compilers differ from those of the pin; go back to them, or take "
                "the new sha256 on purpose"
            )
    return "".join(f"{line}\n" for line in sorted(lines))
