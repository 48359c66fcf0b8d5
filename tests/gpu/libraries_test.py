"""GPU libraries hold the code of exactly their architecture (D23), load without a GPU, and show
nothing but the ABI. Needs no GPU, only the files."""

import struct
from pathlib import Path

import pytest
from deepep import _runtime, registry
from deepep.manifest import VariantEntry

FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, MACHINE_CODE = 1, 2

BUILT = [entry for entry in registry.variants() if entry.arch != "host"]


def embedded(path: Path) -> set[tuple[int, int]]:
    """(kind, architecture) of everything in the file's fat binaries."""
    data, found, at = path.read_bytes(), set(), 0
    while (at := data.find(FATBIN_MAGIC, at)) >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        at += header
        end = at + size
        while at < end:
            kind, _, own, length = struct.unpack_from("<HHIQ", data, at)
            (arch,) = struct.unpack_from("<I", data, at + 28)
            found.add((kind, arch))
            at += own + length
    return found


@pytest.mark.skipif(not BUILT, reason="no GPU kernel is built; build with --kernels=gpu")
@pytest.mark.parametrize("entry", BUILT, ids=lambda entry: entry.name)
def test_a_library_holds_machine_code_and_ptx_of_its_architecture(entry: VariantEntry) -> None:
    number = int(entry.arch.removeprefix("sm"))
    assert embedded(entry.path) == {(PTX, number), (MACHINE_CODE, number)}


@pytest.mark.skipif(not BUILT, reason="no GPU kernel is built; build with --kernels=gpu")
@pytest.mark.parametrize("entry", BUILT, ids=lambda entry: entry.name)
def test_a_library_loads_without_a_gpu_and_is_what_its_name_says(entry: VariantEntry) -> None:
    facts = _runtime.Library(str(entry.path)).facts
    assert {name: facts[name] for name in ("name", "topology", "arch", "dtype", "hidden")} == {
        "name": entry.name,
        "topology": entry.topology,
        "arch": entry.arch,
        "dtype": entry.dtype,
        "hidden": entry.hidden,
    }
