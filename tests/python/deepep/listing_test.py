"""python -m deepep.variants: the list, one library explained, and names that are not built."""

import hashlib
import importlib
import json
from pathlib import Path

import deepep
import pytest
from deepep import listing, registry

NAME = "intranode_host_h512_bf16_r4"
CONTENT = b"a library"


def write_folder(folder: Path, content: bytes = CONTENT) -> Path:
    """A folder with one library."""
    folder.mkdir()
    (folder / f"libdeepep_{NAME}.so").write_bytes(content)
    row = {"name": NAME, "topology": "intranode", "arch": "host", "hidden": 512, "dtype": "bf16"}
    row |= {"num_ranks": 4, "num_nodes": 1, "library": f"libdeepep_{NAME}.so"}
    row |= {"sha256": hashlib.sha256(content).hexdigest(), "library_bytes": 2048}
    row |= {"toolchain": {"cxx": "gcc 12"}, "device_code_bytes": 777}
    kernel = {"kernel": "send<true>", "unit": "dispatch", "registers": 64, "shared_bytes": 896}
    kernel |= {"stack_bytes": 0, "spill_store_bytes": 4, "spill_load_bytes": 8}
    row |= {"kernels": [kernel]}
    document = {"format": 1, "abi_version": 3, "variants": [row]}
    (folder / "manifest.json").write_text(json.dumps(document))
    return folder


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two folders with the same name in them, and no libraries in the package."""
    first = write_folder(tmp_path / "first")
    second = write_folder(tmp_path / "second", b"another")
    monkeypatch.setenv("DEEPEP_VARIANT_PATH", f"{first}:{second}")
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "registry.py"))
    return first, second


def test_the_list_tells_which_folder_counts(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert listing.main([]) == 0
    digest = hashlib.sha256(CONTENT).hexdigest()[:12]
    expected = f"{NAME}      2 KiB  {digest}  {folders[0]} (before 1 more of this name)\n"
    assert capsys.readouterr().out == expected


def test_json_has_the_facts_and_what_is_hidden(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert listing.main(["--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["hidden"] == 512
    assert facts["device_code_bytes"] == 777 and facts["kernels"][0]["registers"] == 64
    assert facts["toolchain"] == {"cxx": "gcc 12"}
    assert facts["path"] == str(folders[0] / f"libdeepep_{NAME}.so")
    assert facts["others"] == [str(folders[1] / f"libdeepep_{NAME}.so")]


def test_explain_gives_the_pin_and_the_state_of_the_file(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert listing.main(["--explain", NAME]) == 0
    out = capsys.readouterr().out
    assert f"{NAME}@{hashlib.sha256(CONTENT).hexdigest()}" in out
    assert "hidden 512, bf16 dispatch and bf16 combine, 4 ranks" in out
    assert "unchanged since it was built" in out
    assert f"hides {folders[1]}" in out
    (folders[0] / f"libdeepep_{NAME}.so").write_text("changed")
    listing.main(["--explain", NAME])
    assert "was changed after it was built" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("intranode_host_h512_bf16_r6", "--hidden 512 --dtype bf16 --ranks 6 --arch host"),
        ("internode_sm90_hany_fp8_rany", "--hidden any --dtype fp8 --ranks any --arch sm90"),
        (
            "intranode_host_h513_bf16_r6",
            "cannot be built: hidden=513 dtype=bf16 makes rows of 1026",
        ),
        ("intranode_host_hany_bf16_r65", "cannot be built: num_ranks=65 on 1 nodes"),
        ("internode_host_h512_bf16_r4x1", "cannot be built: num_nodes=1 with topology internode"),
        ("intranode_host_h0512_bf16_r06", "--hidden 512 --dtype bf16 --ranks 6 --arch host"),
        ("intranode_sm91_h512_bf16_r6", "cannot be built: arch is 'sm91'; write one of host"),
        ("intranod_host_h512_bf16_r6", "cannot be built: topology is 'intranod'"),
        ("intranode_host_h512_fp16_r6", "cannot be built: dtype is 'fp16'"),
        (f"intranode_host_h512_bf16_r{'9' * 5000}", "grammar of names"),
        ("nonsense", "grammar of names"),
        ("", "grammar of names"),
    ],
)
def test_a_name_that_is_not_built_comes_with_the_cure(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    assert listing.main(["--explain", name]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"{name} is not built (1 variants are).")
    assert words in err


def test_without_libraries_the_list_says_how_to_build_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DEEPEP_VARIANT_PATH", raising=False)
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "registry.py"))
    assert listing.main([]) == 0
    assert "./bazelw build //python:deepep" in capsys.readouterr().out


def test_the_function_stays_when_the_command_s_module_is_imported() -> None:
    importlib.import_module("deepep.variants")
    assert deepep.variants is registry.variants


def test_explain_shows_what_the_kernels_take(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert listing.main(["--explain", NAME]) == 0
    out = capsys.readouterr().out
    assert "device code  777 bytes" in out
    header, line = out.splitlines()[-2:]
    assert header.split() == ["kernel", "registers", "shared", "bytes", "spilled", "bytes"]
    assert line.split() == ["dispatch", "send<true>", "64", "896", "12"]
