"""What ptxas says of kernels is read whole, and refused where it cannot be read."""

import subprocess
import sys
from pathlib import Path

import pytest

from codegen import resources
from codegen.errors import CodegenError

REPORT = """\
ptxas info    : Compiling entry function '_ZN6deepep44_GLOBAL__N__0a2c9d34_11_dispatch_cu_2c0cf1e3\
16collected_kernelILb0EEEv13DeepEpContext28DeepEpLowLatencyDispatchArgs' for 'sm_90'
    24 bytes stack frame, 32 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 24 bytes cumulative stack size, 896 bytes smem
ptxas info    : Compiling entry function '_ZN6deepep41_GLOBAL__N__e5161ebb_9_notify_cu_42c454d4\
13notify_kernelE13DeepEpContext16DeepEpNotifyArgs' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 616 bytes cmem[0]
"""


LINKED = """\
ptxas info    : Compiling entry function 'notify_kernel' for 'sm_90'
ptxas info    : Function properties for notify_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 79 registers, used 1 barriers
ptxas info    : Function properties for another_function
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
"""


def test_functions_of_another_library_do_not_count() -> None:
    (row,) = resources.parse(LINKED, "notify")
    assert (row["registers"], row["stack_bytes"], row["spill_store_bytes"]) == (79, 0, 0)


def test_every_kernel_has_a_row(tmp_path: Path) -> None:
    path = tmp_path / "dispatch.o.resources.txt"
    path.write_text(REPORT)
    empty = tmp_path / "variant.o.resources.txt"
    empty.write_text("")
    assert resources.read([path, empty]) == [
        {
            "kernel": "collected_kernel<false>",
            "unit": "dispatch",
            "registers": 80,
            "stack_bytes": 24,
            "spill_store_bytes": 32,
            "spill_load_bytes": 48,
            "shared_bytes": 896,
        },
        {
            "kernel": "notify_kernel",
            "unit": "dispatch",
            "registers": 48,
            "stack_bytes": 0,
            "spill_store_bytes": 0,
            "spill_load_bytes": 0,
            "shared_bytes": 0,
        },
    ]


def test_a_report_in_other_words_is_refused() -> None:
    lines = [line for line in REPORT.splitlines() if "Used" not in line]
    with pytest.raises(CodegenError, match=r"collected_kernel<false>.*-Xptxas -v"):
        resources.parse("\n".join(lines), "dispatch")


def test_names_that_nobody_knows_stay_as_they_are() -> None:
    assert resources.kernel_name("plain") == "plain"
    assert resources.kernel_name("_ZN6deepep1_GLOBAL__N__x_cu_012345673abcEv") == "abc"


def test_sections_are_measured(tmp_path: Path) -> None:
    source, library = tmp_path / "a.cc", tmp_path / "a.so"
    source.write_text('__attribute__((section("marked"))) char data[12345] = {1};')
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    assert resources.section_bytes(library, "marked") == 12345
    assert resources.section_bytes(library, "absent") == 0
    assert resources.section_bytes(Path(sys.argv[0] or __file__), "marked") == 0
    assert resources.section_bytes(source, "marked") == 0
