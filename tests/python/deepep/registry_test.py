"""Selection, pins, manifests and checksums of kernel libraries."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deepep import registry
from deepep.errors import KernelLoadError, UnsupportedConfigError
from deepep.registry import Pin
from deepep.topology import Requirement

NAMES = (
    "intranode_host_h512_bf16_r4",
    "intranode_host_h512_bf16_rany",
    "intranode_host_h7168_bf16_r8",
    "intranode_host_hany_bf16_r4",
    "intranode_host_hany_bf16_rany",
    "intranode_sm90_h7168_fp8_r8",
    "internode_host_h512_bf16_r4x2",
    "internode_host_hany_bf16_rany",
)


def row(name: str) -> dict[str, Any]:
    topology, arch, hidden, dtype, ranks = name.split("_")
    per_node, _, nodes = ranks[1:].partition("x")
    any_nodes = 0 if topology == "internode" else 1
    num_nodes = int(nodes) if nodes else any_nodes
    return {
        "name": name,
        "topology": topology,
        "arch": arch,
        "hidden": 0 if hidden == "hany" else int(hidden[1:]),
        "dtype": dtype,
        "num_ranks": 0 if per_node == "any" else int(per_node),
        "num_nodes": num_nodes,
        "library": f"libdeepep_{name}.so",
        "library_bytes": len(name),
        "sha256": hashlib.sha256(name.encode()).hexdigest(),
        "sources_sha256": "",
        "toolchain": {},
    }


def write_libraries(directory: Path, *names: str) -> Path:
    """A folder as the build makes it; each "library" holds just its name."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / f"libdeepep_{name}.so").write_text(name)
    document = {"format": 1, "abi_version": 3, "variants": [row(name) for name in names]}
    (directory / "manifest.json").write_text(json.dumps(document))
    return directory


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    return write_libraries(tmp_path / "lib", *NAMES)


@pytest.fixture(autouse=True)
def no_pins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DEEPEP_PIN", raising=False)
    monkeypatch.delenv("DEEPEP_VARIANT_PATH", raising=False)
    registry.unpin()
    yield
    registry.unpin()


def host(hidden: int, ranks: int) -> Requirement:
    return Requirement("intranode", "host", hidden, "bf16", ranks)


@pytest.mark.parametrize(
    ("hidden", "ranks", "chosen", "reason"),
    [
        (512, 4, "intranode_host_h512_bf16_r4", "exact match"),
        (512, 3, "intranode_host_h512_bf16_rany", "generic ranks"),
        (7168, 8, "intranode_host_h7168_bf16_r8", "exact match"),
        (3584, 4, "intranode_host_hany_bf16_r4", "generic hidden"),
        (3584, 5, "intranode_host_hany_bf16_rany", "generic hidden and ranks"),
    ],
)
def test_exact_variants_come_before_generic_ones(
    lib: Path, hidden: int, ranks: int, chosen: str, reason: str
) -> None:
    selection = registry.select(host(hidden, ranks), directories=[lib])
    assert selection.entry.name == chosen
    assert selection.entry.path == lib / f"libdeepep_{chosen}.so"
    assert chosen in selection.reason
    assert reason in selection.reason


def test_fixed_hidden_beats_fixed_ranks(tmp_path: Path) -> None:
    lib = write_libraries(tmp_path, "intranode_host_hany_bf16_r4", "intranode_host_h512_bf16_rany")
    selection = registry.select(host(512, 4), directories=[lib])
    assert selection.entry.name == "intranode_host_h512_bf16_rany"


def test_internode_ranks_and_nodes_must_both_fit(lib: Path) -> None:
    two_nodes = Requirement("internode", "host", 512, "bf16", 8, 2)
    assert registry.select(two_nodes, directories=[lib]).entry.name.endswith("r4x2")
    four_nodes = Requirement("internode", "host", 512, "bf16", 8, 4)
    assert registry.select(four_nodes, directories=[lib]).entry.name.endswith("rany")


@pytest.mark.parametrize("hidden", [3584, 5120, 7176])
def test_hidden_without_prebuilt_variant_is_served_or_refused_with_the_cure(
    tmp_path: Path, hidden: int
) -> None:
    # D02: with a generic variant it is served, without one the error says how to build it.
    generic = write_libraries(tmp_path / "a", "intranode_host_hany_bf16_rany")
    assert registry.select(host(hidden, 4), directories=[generic]).entry.hidden == 0
    fixed = write_libraries(tmp_path / "b", "intranode_host_h7168_bf16_r4")
    with pytest.raises(UnsupportedConfigError) as caught:
        registry.select(host(hidden, 4), directories=[fixed])
    text = str(caught.value)
    assert f"hidden={hidden}" in text
    assert "hidden 7168 with 4 ranks" in text
    assert f"intranode_host_h{hidden}_bf16_r4" in text
    assert (
        f"./bazelw run //tools:gen_variants -- --hidden {hidden} --dtype bf16 --ranks 4 "
        "--arch host --topology intranode" in text
    )


def test_refusal_lists_the_nearest_variants_of_other_kinds(lib: Path) -> None:
    with pytest.raises(UnsupportedConfigError) as caught:
        registry.select(Requirement("intranode", "sm90", 6144, "fp8", 8), directories=[lib])
    text = str(caught.value)
    assert "Built for intranode sm90 fp8: hidden 7168 with 8 ranks." in text
    assert "Nearest: intranode_sm90_h7168_fp8_r8" in text
    with pytest.raises(UnsupportedConfigError, match="Nothing is built for lowlatency host bf16"):
        registry.select(Requirement("lowlatency", "host", 512, "bf16", 4), directories=[lib])


def test_several_nodes_are_written_as_in_variant_names(tmp_path: Path) -> None:
    lib = write_libraries(tmp_path, "intranode_host_hany_bf16_rany")
    with pytest.raises(UnsupportedConfigError, match="--ranks 4x2 --arch sm90"):
        registry.select(Requirement("internode", "sm90", 512, "bf16", 8, 2), directories=[lib])


def test_a_refusal_between_nodes_tells_ranks_of_a_node(tmp_path: Path) -> None:
    names = [f"internode_host_h512_bf16_r{ranks}" for ranks in ("2x2", "8x2", "4x4")]
    lib = write_libraries(tmp_path, *names)
    with pytest.raises(UnsupportedConfigError) as caught:
        registry.select(Requirement("internode", "host", 512, "bf16", 24, 6), directories=[lib])
    text = str(caught.value)
    assert "hidden 512 with 4 ranks on each of 4 nodes; hidden 512 with 8 ranks on each" in text
    assert "Nearest: internode_host_h512_bf16_r4x4, " in text
    assert "--ranks 4x6" in text


def test_row_not_a_multiple_of_16_bytes_is_refused_before_any_lookup(tmp_path: Path) -> None:
    # D03: the folder does not even exist.
    for hidden, row_bytes in ((4, 8), (7, 14)):
        with pytest.raises(ValueError, match=f"{row_bytes} bytes.*multiple of 16 bytes"):
            registry.select(host(hidden, 4), directories=[tmp_path / "absent"])


def test_shapeless_work_takes_any_library_of_the_kind(
    lib: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package's own folder, in place of what is built.
    monkeypatch.setattr(registry, "__file__", str(lib.parent / "registry.py"))
    selection = registry.select_shapeless("intranode", "host", 8)
    assert selection.entry.name == "intranode_host_h7168_bf16_r8"
    assert registry.select_shapeless("intranode", "host", 5).entry.num_ranks == 0
    with pytest.raises(UnsupportedConfigError, match="Nothing is built for lowlatency host"):
        registry.select_shapeless("lowlatency", "host", 4)


def test_pin_limits_selection_and_says_so(lib: Path) -> None:
    registry.pin("intranode_host_hany_bf16_rany")
    selection = registry.select(host(512, 4), directories=[lib])
    assert selection.entry.name == "intranode_host_hany_bf16_rany"
    assert "pins" in selection.reason
    registry.unpin()
    assert registry.select(host(512, 4), directories=[lib]).entry.name.endswith("r4")


def test_pin_with_sha256_must_match_the_library(lib: Path) -> None:
    name = "intranode_host_h512_bf16_r4"
    digest = hashlib.sha256(name.encode()).hexdigest()
    registry.pin(f"{name}@{digest}")
    assert registry.select(host(512, 4), directories=[lib]).entry.sha256 == digest
    registry.pin(f"{name}@{'0' * 64}")
    with pytest.raises(KernelLoadError) as caught:
        registry.select(host(512, 4), directories=[lib])
    assert digest in str(caught.value)
    assert "0" * 64 in str(caught.value)


def test_environment_pins_apply_unless_code_pins(
    lib: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPEP_PIN", "intranode_host_hany_bf16_rany, intranode_host_h7168_bf16_r8")
    chosen = registry.select(host(512, 4), directories=[lib]).entry.name
    assert chosen == "intranode_host_hany_bf16_rany"
    registry.pin("intranode_host_h512_bf16_r4")
    chosen = registry.select(host(512, 4), directories=[lib]).entry.name
    assert chosen == "intranode_host_h512_bf16_r4"


def test_pins_that_do_not_fit_name_themselves_and_the_way_out(lib: Path) -> None:
    registry.pin("intranode_host_h7168_bf16_r8")
    with pytest.raises(UnsupportedConfigError) as caught:
        registry.select(host(512, 4), directories=[lib])
    text = str(caught.value)
    assert "limited by pins to intranode_host_h7168_bf16_r8" in text
    assert "deepep.unpin()" in text


def test_unknown_pin_lists_close_names(lib: Path) -> None:
    registry.pin("intranode_host_h7168_bf16_r9")
    with pytest.raises(UnsupportedConfigError, match="Close names: intranode_host_h7168_bf16_r8"):
        registry.select(host(512, 4), directories=[lib])


@pytest.mark.parametrize("text", ["", "@", "name@", "name@12ab", f"name@{'g' * 64}"])
def test_malformed_pins_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="pin"):
        Pin.parse(text)
    with pytest.raises(ValueError):
        registry.pin()


def test_variant_path_is_searched_before_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "intranode_host_h512_bf16_r4"
    first, second = (write_libraries(tmp_path / part, name) for part in ("first", "second"))
    monkeypatch.setenv("DEEPEP_VARIANT_PATH", f"{first}:{second}")
    directories = registry.search_directories()
    assert directories[:2] == (first, second)
    assert directories[2].name == "lib"
    (entry,) = [entry for entry in registry.variants() if entry.name == name]
    assert entry.directory == first
    monkeypatch.setenv("DEEPEP_VARIANT_PATH", f"{first}::{first}")
    assert len(registry.search_directories()) == 2


def test_the_reason_says_which_of_two_libraries_of_one_name_counts(tmp_path: Path) -> None:
    name = "intranode_host_h512_bf16_r4"
    folders = [write_libraries(tmp_path / part, name) for part in ("first", "second")]
    reason = registry.select(host(512, 4), directories=folders).reason
    assert f"taken from {folders[0]} and not from {folders[1]}" in reason
    assert "searched in order" in reason
    alone = registry.select(host(512, 4), directories=folders[:1]).reason
    assert alone == f"{name}: exact match"


def test_a_pin_with_sha256_finds_its_library_in_any_folder(tmp_path: Path) -> None:
    name = "intranode_host_h512_bf16_r4"
    folders = [write_libraries(tmp_path / part, name) for part in ("first", "second")]
    other = {**row(name), "sha256": "a" * 64}
    document = {"format": 1, "abi_version": 3, "variants": [other]}
    (folders[1] / "manifest.json").write_text(json.dumps(document))
    selection = registry.select(host(512, 4), [Pin(name, "a" * 64)], folders)
    assert selection.entry.directory == folders[1]
    assert "since the pin's sha256 is its own" in selection.reason
    with pytest.raises(KernelLoadError) as caught:
        registry.select(host(512, 4), [Pin(name, "b" * 64)], folders)
    assert all(str(folder) in str(caught.value) for folder in folders)


def test_folder_without_manifest_is_an_error_when_it_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(KernelLoadError, match=r"manifest\.json"):
        registry.variants([tmp_path])


def test_nothing_installed_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "registry.py"))
    assert registry.variants() == ()
    with pytest.raises(UnsupportedConfigError, match="No kernel libraries are installed at all"):
        registry.select(host(512, 4))


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("{", "not JSON"),
        ("[]", "no JSON object"),
        ('{"format": 2, "abi_version": 3, "variants": []}', "format 2, this package reads 1"),
        ('{"format": 1, "abi_version": 9, "variants": []}', "abi_version 9, this package reads 3"),
        ('{"format": 1, "abi_version": 3, "variants": [{"name": "x"}]}', "malformed"),
    ],
)
def test_unusable_manifests_are_named_with_the_cure(
    tmp_path: Path, document: str, text: str
) -> None:
    (tmp_path / "manifest.json").write_text(document)
    with pytest.raises(KernelLoadError, match=text) as caught:
        registry.variants([tmp_path])
    assert str(tmp_path / "manifest.json") in str(caught.value)
    assert "bazelw build" in str(caught.value)


def test_library_outside_its_folder_is_malformed(tmp_path: Path) -> None:
    bad = {**row(NAMES[0]), "library": "../libdeepep.so"}
    document = {"format": 1, "abi_version": 3, "variants": [bad]}
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(KernelLoadError, match="plain file name"):
        registry.variants([tmp_path])


def test_verify_accepts_the_built_file_and_names_a_changed_one(lib: Path) -> None:
    entry = registry.select(host(512, 4), directories=[lib]).entry
    registry.verify(entry)
    entry.path.write_text("other bytes")
    with pytest.raises(KernelLoadError) as caught:
        registry.verify(entry)
    text = str(caught.value)
    assert str(entry.path) in text
    assert entry.sha256 in text
    assert hashlib.sha256(b"other bytes").hexdigest() in text
    assert f"//kernels:{entry.name}" in text
    entry.path.unlink()
    with pytest.raises(KernelLoadError, match="Cannot read"):
        registry.verify(entry)
