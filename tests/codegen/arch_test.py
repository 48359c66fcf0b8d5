"""The facts of each architecture hang together."""

from typing import get_args

import pytest

from codegen.arch import ARCHS, Arch
from codegen.variant import ArchName

GPUS = [arch for arch in ARCHS.values() if arch.name != "host"]


def test_names_are_those_of_the_grammar() -> None:
    assert tuple(ARCHS) == get_args(ArchName)


def test_host_needs_no_gpu() -> None:
    host = ARCHS["host"]
    assert (host.source_suffix, host.gencode, host.min_capability) == ("cc", "", (0, 0))
    assert host.header == "kernels/device/arch/host.h"


@pytest.mark.parametrize("arch", GPUS, ids=lambda arch: arch.name)
def test_a_gpu_is_compiled_for_its_own_capability(arch: Arch) -> None:
    number = arch.name.removeprefix("sm")
    assert "".join(map(str, arch.min_capability)) == number
    assert arch.gencode.startswith(f"arch=compute_{number}")
    assert arch.header == f"kernels/device/arch/{arch.name}.cuh"
    assert (arch.source_suffix, arch.warp_size) == ("cu", 32)


def test_shared_memory_is_what_the_cuda_programming_guide_gives() -> None:
    assert ARCHS["sm80"].max_shared_bytes == 166912  # 163 KiB
    assert ARCHS["sm90"].max_shared_bytes == 232448  # 227 KiB


def test_capabilities() -> None:
    assert [a.name for a in ARCHS.values() if a.has_tma] == ["sm90"]
    assert [a.name for a in ARCHS.values() if a.has_fp8_cvt] == ["sm90"]
