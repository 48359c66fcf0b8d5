"""Rows are added sorted and once; all else in the table stays as it was."""

from pathlib import Path

import pytest

from codegen.errors import CodegenError
from codegen.table import TABLE, read_sets, read_table
from codegen.variant import Variant
from tools.variant_rows import EXTRA, OWN, add, names, sort_key

H512_R10, H512_R4, ANY, H7168 = (
    Variant.parse(name)
    for name in (
        "intranode_host_h512_bf16_r10",
        "intranode_host_h512_bf16_r4",
        "intranode_host_hany_bf16_rany",
        "intranode_sm90_h7168_fp8_r8",
    )
)


def test_rows_are_sorted_by_value_and_never_doubled(tmp_path: Path) -> None:
    path = tmp_path / "mine.bzl"
    assert names(path, OWN) == []
    add(path, OWN, [H7168, H512_R10])
    add(path, OWN, [H512_R4, H7168, ANY])
    assert names(path, OWN) == [v.name for v in (ANY, H512_R4, H512_R10, H7168)]
    assert read_table(path) == sorted([ANY, H512_R4, H512_R10, H7168], key=sort_key)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.bzl"]


def test_adding_again_changes_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "mine.bzl"
    text = add(path, OWN, [H7168, ANY])
    assert add(path, OWN, [ANY]) == text == path.read_text()


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.bzl"
    assert H7168.name in add(path, OWN, [H7168], write=False)
    assert not path.exists()


def test_the_repository_s_table_takes_rows(tmp_path: Path) -> None:
    path = tmp_path / "variants.bzl"
    path.write_text(TABLE.read_text())
    # The second is in the catalog as well: from then on it is in the set `gpu`.
    added = [Variant.parse(f"intranode_{name}_r8") for name in ("host_h3584_fp8", "sm80_h4096_fp8")]
    before = read_sets(path)
    assert not set(added) & set(before["gpu"])
    text = add(path, EXTRA, added)
    sets = read_sets(path)
    assert set(sets["default"]) - set(before["default"]) == {added[0]}
    assert set(sets["gpu"]) - set(before["gpu"]) == set(added)
    assert set(read_table(path)) == set(read_table()) | set(added)
    assert len(text.splitlines()) == len(TABLE.read_text().splitlines()) + sum(
        v.name not in names(TABLE, EXTRA) for v in added
    )


@pytest.mark.parametrize(
    "body",
    [
        "VARIANTS = list()",
        'VARIANTS = ["intranode_" + "host"]',
        "VARIANTS = [\n    # A comment.\n]",
        "VARIANTS = []\nVARIANTS = []",
        "x = 1",
    ],
)
def test_a_list_that_is_computed_is_left_alone(tmp_path: Path, body: str) -> None:
    path = tmp_path / "mine.bzl"
    path.write_text(body)
    with pytest.raises(CodegenError):
        add(path, OWN, [ANY])
    assert path.read_text() == body


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "mine.bzl", tmp_path / "link.bzl"
    path.write_text('VARIANTS=["intranode_host_h512_bf16_r4"]\n')
    link.symlink_to(path)
    add(link, OWN, [ANY])
    assert link.is_symlink()
    assert names(path, OWN) == [ANY.name, H512_R4.name]


def test_a_table_that_cannot_be_written_is_named_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "mine.bzl"
    with pytest.raises(CodegenError, match=f"{path} cannot be written: No such file.*make its fol"):
        add(path, OWN, [ANY])
