"""The manifest says the same bytes for the same inputs, and what the registry needs."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from codegen import manifest
from codegen.errors import CodegenError
from codegen.variant import Variant

ROOT = Path(__file__).parent.parent.parent
VARIANT = Variant.parse("internode_sm90_h7168_fp8_r8x4")


def library(folder: Path, variant: Variant = VARIANT) -> Path:
    """Write something in a library's place."""
    path = folder / variant.library
    path.write_bytes(b"library of " + variant.name.encode())
    return path


def test_a_row_holds_the_facts_and_the_digest(tmp_path: Path) -> None:
    path = library(tmp_path)
    assert manifest.row(VARIANT, path, toolchain={"nvcc": "13.0", "gcc": "12.2"}) == {
        "name": "internode_sm90_h7168_fp8_r8x4",
        "topology": "internode",
        "arch": "sm90",
        "hidden": 7168,
        "dtype": "fp8",
        "num_ranks": 8,
        "num_nodes": 4,
        "library": "libdeepep_internode_sm90_h7168_fp8_r8x4.so",
        "library_bytes": path.stat().st_size,
        "device_code_bytes": 0,
        "kernels": [],
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "sources_sha256": "",
        "toolchain": {"gcc": "12.2", "nvcc": "13.0"},
    }


def test_the_sources_digest_follows_contents_only(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.cu", "b.cu", "c.cu")]
    for path, text in zip(files, ("one", "two", "one"), strict=True):
        path.write_text(text)
    a, b, c = files
    assert manifest.sources_digest([a, b]) == manifest.sources_digest([b, c])
    assert manifest.sources_digest([a, b]) != manifest.sources_digest([a])
    assert manifest.sources_digest([a, c]) != manifest.sources_digest([a])


def test_a_library_of_another_variant_is_refused(tmp_path: Path) -> None:
    path = library(tmp_path, Variant.parse("intranode_host_hany_bf16_rany"))
    with pytest.raises(CodegenError, match="rename it, or give the variant"):
        manifest.row(VARIANT, path)


def test_rows_are_sorted_and_each_is_there_once(tmp_path: Path) -> None:
    names = ["intranode_host_hany_bf16_rany", "intranode_host_h512_bf16_r4"]
    rows = [manifest.row(v, library(tmp_path, v)) for v in map(Variant.parse, names)]
    text = manifest.dumps(rows)
    assert text == manifest.dumps(reversed(rows))
    document = json.loads(text)
    assert document["format"] == 1
    assert [entry["name"] for entry in document["variants"]] == sorted(names)
    with pytest.raises(CodegenError, match="intranode_host_h512_bf16_r4 more than once"):
        manifest.dumps([*rows, rows[1]])


def test_the_abi_version_is_the_header_s() -> None:
    header = (ROOT / "kernels/abi/deepep_kernel.h").read_text()
    version = re.search(r"#define DEEPEP_ABI_VERSION (\d+)", header)
    assert version and int(version[1]) == manifest.ABI_VERSION
