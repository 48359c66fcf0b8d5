"""From flags to rows: what is added, what is refused, and that refusals name commands that work."""

import re
import shlex
from pathlib import Path

import pytest
from absl import flags
from deepep.quickstart import settings
from deepep.refusal import build_command
from deepep.topology import MAX_HIDDEN, Requirement, Topology

from codegen.errors import CodegenError
from codegen.table import TABLE
from codegen.variant import MAX_HIDDEN as GENERATED_HIDDEN
from tools import gen_variants, variant_rows
from tools.variant_models import Model

HEADER = Path(__file__).parent.parent.parent / "kernels" / "abi" / "deepep_kernel.h"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree with a copy of the table."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "variants.bzl").write_text(TABLE.read_text())
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    return tmp_path


def call(command: str) -> int:
    """Runs the tool with the arguments of a command line."""
    given = flags.FlagValues()
    gen_variants.define_flags(given)
    return gen_variants.call(given, given(["gen_variants", *shlex.split(command)]))


def added(tree: Path) -> list[str]:
    return variant_rows.names(tree / "kernels" / "variants.bzl", variant_rows.EXTRA)


def test_rows_are_written_and_the_next_commands_printed(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--hidden 3584 --dtype fp8 --ranks 6 --arch sm90,host --topology intranode") == 0
    names = ["intranode_host_h3584_fp8_r6", "intranode_sm90_h3584_fp8_r6"]
    assert set(names) <= set(added(tree))
    out = capsys.readouterr().out
    assert "Added to" in out
    assert "./bazelw build //kernels:" + " //kernels:".join(names) in out
    assert "./bazelw build --kernels=gpu //python:wheel" in out
    assert call("--hidden 3584 --dtype fp8 --ranks 6 --arch sm90,host") == 0
    out = capsys.readouterr().out
    assert "Already in" in out
    assert "Added to" not in out


def test_what_a_default_build_has_needs_no_row(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = added(tree)
    assert call("--model deepseek-v3") == 0
    assert added(tree) == before
    out = capsys.readouterr().out
    assert "deepseek-v3: hidden 7168, 256 experts, top 8, fp8" in out
    assert "intranode_sm90_h7168_fp8_r8" in out


def test_a_dry_run_and_an_own_table_leave_the_repository_s_alone(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (tree / "kernels" / "variants.bzl").read_text()
    assert call("--hidden 3584 --arch host --dry_run") == 0
    assert "Would add to" in capsys.readouterr().out
    assert call("--hidden any --dtype bf16 --arch host --ranks any --table mine.bzl") == 0
    assert variant_rows.names(tree / "mine.bzl", "VARIANTS") == ["intranode_host_hany_bf16_rany"]
    assert f"DEEPEP_VARIANTS={tree / 'mine.bzl'} ./bazelw" in capsys.readouterr().out
    assert (tree / "kernels" / "variants.bzl").read_text() == before


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--hidden 3580 --dtype fp8", "hidden is 3580.*multiple of 16 bytes; pad hidden to 3584"),
        ("--hidden 3584 --ranks 65", "ranks is 65.*1 to 64.*internode"),
        ("--hidden 3584 --arch sm70", "arch is 'sm70', but must be one of host, sm80, sm90"),
        ("--hidden 3584 --dtype fp16", "dtype is 'fp16'.*did you mean bf16"),
        ("--hidden 3584 --topology intranod", "did you mean intranode"),
        ("--hidden 3,584", "pad hidden to 8"),
        ("--dtype fp8", "hidden is not given"),
        ("--model llama", "model is 'llama'"),
        ("--hidden -8", "hidden is '-8', but must be a number from 1 to 1048576, or any"),
        ("--hidden 0,99999999999", "hidden is '0', .*\n  hidden is '99999999999', but"),
        ("--hidden 1048584 --arch host", "hidden is 1048584, but must be 1 to 1048576"),
        ("--hidden 512, --ranks 8", "hidden is '', but"),
        ("--hidden 512 --ranks 08", "ranks is '08', but must be a number from 1 to 64"),
        ("--hidden 512 --ranks 4X2 --topology internode", r"ranks is '4X2', .*\(8x4\)"),
        ("--hidden 512 --ranks 3x1 --topology internode", "joins 2 to 64 nodes"),
        ("--hidden 512 --ranks 4x2", "nodes is 2, but intranode .* or choose internode"),
        ("--hidden 512 --dtype BF16", "dtype is 'BF16', but must be one of bf16, fp8"),
        ("--hidden 512 --table absent/mine.bzl", "absent/mine.bzl cannot be written"),
        ("--hidden 3584 fp8", "'fp8' is no flag"),
        ("--hidden 3584 --ranks 8x2,65x2 --topology internode --arch host", "ranks is 65"),
    ],
)
def test_refusals_say_what_and_write_nothing(
    tree: Path, capsys: pytest.CaptureFixture[str], command: str, words: str
) -> None:
    before = (tree / "kernels" / "variants.bzl").read_text()
    assert call(command) == 2
    assert re.search(words, capsys.readouterr().err)
    assert (tree / "kernels" / "variants.bzl").read_text() == before


@pytest.mark.parametrize(
    ("topology", "num_nodes"), [("intranode", 1), ("lowlatency", 1), ("internode", 3)]
)
def test_the_command_of_a_refusal_adds_the_missing_variant(
    tree: Path, topology: Topology, num_nodes: int
) -> None:
    requirement = Requirement(topology, "sm90", 6144, "fp8", 6, num_nodes)
    tool, arguments = build_command(requirement).split(" -- ")
    assert tool == "./bazelw run //tools:gen_variants"
    assert call(arguments) == 0
    assert requirement.variant_name in added(tree)


def test_ranks_go_with_the_topologies_that_take_them() -> None:
    names = gen_variants.combinations(
        ["intranode", "internode"], ["sm90"], ["512"], ["bf16"], ["8", "8x4", "any"]
    )
    assert [text.split("_")[0] + " " + text.split("_")[-1] for text in names] == [
        *("intranode r8", "intranode rany"),
        *("internode r8x4", "internode rany"),
    ]


def test_every_reason_is_given_once() -> None:
    names = [f"intranode_{arch}_h100_fp8_r6" for arch in ("host", "sm80")]
    with pytest.raises(CodegenError) as caught:
        gen_variants.check([*names, "intranode_host_h512_fp8_r65"])
    assert len(str(caught.value).splitlines()) == 3
    assert "intranode_host_h100_fp8_r6 and 1 more" in str(caught.value)


def test_the_runtime_s_limits_are_those_of_the_abi() -> None:
    text = HEADER.read_text()
    assert f"#define DEEPEP_MAX_LOCAL_EXPERTS {gen_variants.MAX_LOCAL_EXPERTS} " in text
    assert f"#define DEEPEP_MAX_TOPK {gen_variants.MAX_TOPK} " in text
    assert (settings.MAX_LOCAL_EXPERTS, settings.MAX_TOPK) == (
        gen_variants.MAX_LOCAL_EXPERTS,
        gen_variants.MAX_TOPK,
    )
    assert MAX_HIDDEN == GENERATED_HIDDEN
    rows = gen_variants.check(["intranode_host_h512_bf16_r2"])
    assert len(list(gen_variants.limits(Model("big", 512, 4096, 64, "bf16"), rows))) == 2
