"""The command line: output on stdout or in a file; refusals as one line on stderr and code 2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from codegen.__main__ import main
from codegen.render import render
from codegen.variant import Variant

NAME = "intranode_host_h512_bf16_r4"


@pytest.fixture
def table(tmp_path: Path) -> str:
    """A table of two names."""
    path = tmp_path / "variants.bzl"
    path.write_text(f'VARIANTS = ["{NAME}", "intranode_sm90_h7168_fp8_r8"]\n')
    return str(path)


def test_list_prints_the_table_in_order(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--table", table]) == 0
    assert capsys.readouterr().out == f"{NAME}\nintranode_sm90_h7168_fp8_r8\n"


def test_explain_prints_every_fact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", NAME]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["hidden"].startswith("512 ")
    assert rows["row_bytes"].startswith("1024 ")
    assert rows["library"].startswith(f"libdeepep_{NAME}.so ")
    assert rows["bazel_target"].startswith(f"//kernels:{NAME} ")
    assert rows["arch_facts.has_tma"].startswith("False ")


def test_explain_prints_every_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", NAME]) == 0
    out = capsys.readouterr().out
    for unit in Variant.parse(NAME).units:
        assert f"{NAME}/{unit}.cc" in out
    assert "codegen/templates/base/variant.cu.j2" in out


def test_render_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = render(Variant.parse(NAME), "variant")
    assert main(["render", NAME, "variant"]) == 0
    assert capsys.readouterr().out == text
    assert main(["render", NAME, "variant", "-o", str(tmp_path / "variant.cc")]) == 0
    assert (tmp_path / "variant.cc").read_text() == text


def test_manifest_reads_arguments_from_a_file(tmp_path: Path) -> None:
    library = tmp_path / f"libdeepep_{NAME}.so"
    library.write_bytes(b"elf")
    (tmp_path / "notify.cc").write_text("notify")
    arguments = tmp_path / "arguments"
    arguments.write_text(
        f"{NAME}={library}\n--source={NAME}={tmp_path / 'notify.cc'}\n--toolchain={NAME}=gcc=12.2\n"
    )
    assert main(["manifest", "-o", str(tmp_path / "manifest.json"), f"@{arguments}"]) == 0
    (row,) = json.loads((tmp_path / "manifest.json").read_text())["variants"]
    assert (row["name"], row["library_bytes"]) == (NAME, 3)
    assert row["toolchain"] == {"gcc": "12.2"}
    assert len(row["sources_sha256"]) == 64


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "intranode_host_h512bf16_r4"], f"did you mean {NAME}?"),
        (["explain", "intranod_host_h512_bf16_r4"], "did you mean intranode?"),
        (["render", NAME, "dispach"], "did you mean dispatch?"),
        (["manifest", f"{NAME}=missing/libdeepep_{NAME}.so"], "missing/libdeepep_"),
        (["manifest", "banana=libdeepep_banana.so"], "'banana'"),
    ],
)
def test_refusals_are_one_line_and_code_2(
    arguments: list[str], words: str, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--table", table]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("codegen: ") and captured.err.count("\n") == 1
    assert words in captured.err


def test_a_missing_table_does_not_hide_the_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "banana", "--table", "no/such/table"]) == 2
    assert "variant name is 'banana'" in capsys.readouterr().err


def test_python_m_codegen_shows_no_traceback() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "codegen", "explain", "banana"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "'banana'" in done.stderr
