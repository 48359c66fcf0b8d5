"""The table is read as Bazel reads it, and a bad row is refused by name."""

from pathlib import Path

import pytest

from codegen.errors import CodegenError
from codegen.table import read_table


def table(folder: Path, text: str) -> Path:
    """Write a table."""
    path = folder / "variants.bzl"
    path.write_text(text)
    return path


def test_the_common_subset_of_starlark_and_python_is_run(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        '"""Table."""\n'
        "def _names(hidden):\n"
        '    names = ["intranode_%s_h%s_bf16_r8"]\n'
        '    return [n % (a, h) for n in names for a in ("host", "sm90") for h in hidden]\n'
        "VARIANTS = _names([2048, 7168])\n",
    )
    assert [variant.name for variant in read_table(path)] == [
        "intranode_host_h2048_bf16_r8",
        "intranode_host_h7168_bf16_r8",
        "intranode_sm90_h2048_bf16_r8",
        "intranode_sm90_h7168_bf16_r8",
    ]


def test_the_repository_s_table_is_legal() -> None:
    assert read_table()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NAMES = []", "VARIANTS of .* is NoneType, but must be a list"),
        ("VARIANTS = [1]", "must be a list of variant names"),
        ('VARIANTS = ["intranode_host_h512_bf16_r4"] * 2', "more than once"),
        ('VARIANTS = ["intranode_host_h100_fp8_r4"]', "pad hidden to 112"),
        ('load("//x.bzl", "y")', "cannot be read: name 'load' is not defined"),
        ("import os", "cannot be read"),
        ('open("x")', "cannot be read: name 'open' is not defined"),
        ("VARIANTS = [", "cannot be read"),
        ("VARIANTS = [1 // 0]", "cannot be read: integer division"),
        ("VARIANTS = {}['a']", "cannot be read"),
        ("VARIANTS = ['\0']", "cannot be read"),
        ('fail("families overlap")', "^families overlap$"),
    ],
)
def test_a_bad_table_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(CodegenError, match=words):
        read_table(table(tmp_path, text))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "variants.bzl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CodegenError, match="cannot be read"):
        read_table(path)
