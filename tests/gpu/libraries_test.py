"""GPU libraries hold the code of exactly their architecture (D23), load without a GPU, and show
nothing but the ABI. Needs no GPU, only the files."""

import struct
from pathlib import Path

import pytest
from deepep import _runtime, registry
from deepep.manifest import VariantEntry

FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, MACHINE_CODE = 1, 2

# Registers of a thread, at most, by kernel: a little above what it takes today. A block of 1024
# threads can have 64, one of 512 128. And static shared memory of a block.
REGISTERS = {
    "sm80": {
        "layout_kernel": 64,
        "notify_kernel": 56,
        "dispatch_kernel": 96,
        "combine_kernel": 128,
        "direct_kernel<false>": 112,
        "direct_kernel<true>": 88,
        "collected_kernel<false>": 128,
        "collected_kernel<true>": 128,
        "send_kernel": 104,
        "decode_kernel": 56,
        "receive_kernel": 168,
    },
    "sm90": {
        "layout_kernel": 64,
        "notify_kernel": 56,
        "dispatch_kernel": 56,
        "combine_kernel": 128,
        "direct_kernel<false>": 80,
        "direct_kernel<true>": 64,
        "collected_kernel<false>": 80,
        "collected_kernel<true>": 80,
        "send_kernel": 80,
        "decode_kernel": 56,
        "receive_kernel": 128,
    },
}
# Across nodes blocks have 512 threads (notify, dispatch on SM90) or 256.
INTERNODE_REGISTERS = {
    "layout_kernel": 64,
    "notify_kernel": 96,
    "dispatch_kernel": 255,
    "combine_kernel": 255,
}
SHARED_BYTES = 12 * 1024

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
    own = {(PTX, number), (MACHINE_CODE, number)}
    if entry.topology == "internode":  # NVSHMEM's device library brings code of its own
        assert own <= embedded(entry.path)
    else:
        assert embedded(entry.path) == own


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


@pytest.mark.skipif(not BUILT, reason="no GPU kernel is built; build with --kernels=gpu")
@pytest.mark.parametrize("entry", BUILT, ids=lambda entry: entry.name)
def test_kernels_keep_within_their_budgets(entry: VariantEntry) -> None:
    assert entry.kernels and entry.device_code_bytes > 0, "the manifest has no report"
    budget = INTERNODE_REGISTERS if entry.topology == "internode" else REGISTERS[entry.arch]
    over = [
        f"{kernel.kernel}: {kernel.registers} registers of {budget[kernel.kernel]}, "
        f"{kernel.shared_bytes} bytes of shared memory of {SHARED_BYTES}"
        for kernel in entry.kernels
        if kernel.registers > budget[kernel.kernel] or kernel.shared_bytes > SHARED_BYTES
    ]
    spilled = [
        f"{kernel.kernel}: {kernel.spill_store_bytes} + {kernel.spill_load_bytes} bytes spilled, "
        f"a stack frame of {kernel.stack_bytes}"
        for kernel in entry.kernels
        if kernel.spill_store_bytes or kernel.spill_load_bytes or kernel.stack_bytes
    ]
    assert not over + spilled, "; ".join(over + spilled)
