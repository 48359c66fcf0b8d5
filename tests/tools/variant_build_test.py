"""Commands that are printed, and what is said of a library that was built."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from codegen.variant import Variant
from tools import variant_build

HOST = Variant.parse("intranode_host_h3584_fp8_r6")
GPU = Variant.parse("intranode_sm90_h3584_fp8_r6")


def facts(variant: Variant) -> dict[str, Any]:
    named = ("name", "topology", "arch", "dtype", "hidden", "num_ranks", "num_nodes")
    return {name: getattr(variant, name) for name in named}


def test_commands_name_the_set_or_the_own_table() -> None:
    assert variant_build.build_command([HOST.name], None) == f"./bazelw build //kernels:{HOST.name}"
    wheel = "./bazelw build --kernels={} //python:wheel"
    assert variant_build.package_command([HOST], None) == wheel.format("default")
    assert variant_build.package_command([HOST, GPU], None) == wheel.format("gpu")
    own = Path("/x/mine.bzl")
    prefix = "DEEPEP_VARIANTS=/x/mine.bzl "
    assert variant_build.package_command([GPU], own) == prefix + wheel.format("own")
    assert variant_build.build_command([HOST.name], own).startswith(prefix)
    spaced = variant_build.build_command([HOST.name], Path("/x/our tables/mine.bzl"))
    assert spaced.startswith("DEEPEP_VARIANTS='/x/our tables/mine.bzl' ./bazelw")


def test_each_library_is_loaded_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for variant in (HOST, GPU):
        (tmp_path / variant.library).write_bytes(b"\0" * 2048)
    loaded = {str(tmp_path / v.library): SimpleNamespace(facts=facts(v)) for v in (HOST, GPU)}
    runtime = SimpleNamespace(Library=loaded.__getitem__)
    (tmp_path / GPU.name).mkdir()
    (tmp_path / GPU.name / "notify.o.resources.txt").write_text(
        "ptxas info    : Compiling entry function 'count' for 'sm_90'\n"
        "    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 48 registers, used 1 barriers, 132 bytes smem\n"
    )
    assert variant_build.report([HOST, GPU], tmp_path, runtime) == 0
    assert capsys.readouterr().out == (
        f"{HOST.name}: 2 KiB, loads\n{GPU.name}: 2 KiB, loads\n"
        "  notify count: 48 registers, 132 bytes of shared memory, 12 bytes spilled\n"
    )


def test_a_library_that_lies_or_does_not_load_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / HOST.library).write_bytes(b"\0" * 1024)

    def library(path: str) -> SimpleNamespace:
        if path.endswith(GPU.library):
            raise RuntimeError("cannot open it")
        return SimpleNamespace(facts={**facts(HOST), "hidden": 7168})

    assert variant_build.report([HOST, GPU], tmp_path, SimpleNamespace(Library=library)) == 1
    out = capsys.readouterr().out
    assert f"{HOST.name}: 1 KiB, hidden is 7168, not 3584" in out
    assert f"{GPU.name}: missing, cannot open it" in out


def test_ranks_of_several_nodes_are_compared_whole() -> None:
    rails = Variant.parse("internode_host_h512_bf16_r2x4")
    assert variant_build.differences(rails, facts(rails)) == []
    wrong = {**facts(rails), "num_nodes": 2}
    assert variant_build.differences(rails, wrong) == ["num_nodes is 2, not 4"]
