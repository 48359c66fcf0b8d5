"""A pinned set holds what it lists, and nothing else, under the hashes that it states."""

import hashlib
import json
from pathlib import Path

import pytest

from codegen import manifest
from codegen.errors import CodegenError

# Built by the target `pinned_libraries` in tests/BUILD.bazel.
FOLDER = Path(__file__).parent.parent.parent / "pinned_libraries"
LISTED = ["intranode_host_h512_bf16_r4", "intranode_host_hany_bf16_rany"]


def test_the_folder_holds_the_listed_libraries_and_their_hashes() -> None:
    rows = json.loads((FOLDER / "manifest.json").read_text())["variants"]
    assert [row["name"] for row in rows] == LISTED
    libraries = {path.name: path for path in FOLDER.glob("*.so")}
    assert sorted(libraries) == sorted(row["library"] for row in rows)
    for row in rows:
        digest = hashlib.sha256(libraries[row["library"]].read_bytes()).hexdigest()
        assert digest == row["sha256"]
    pins = (FOLDER / "pins.txt").read_text().splitlines()
    assert pins == [f"{row['name']}@{row['sha256']}" for row in rows]


def test_a_library_that_differs_from_its_pin_stops_the_build(tmp_path: Path) -> None:
    name = LISTED[0]
    library = tmp_path / f"libdeepep_{name}.so"
    library.write_bytes(b"as it was")
    (line,) = manifest.pins({name: library}).splitlines()
    assert manifest.pins({name: library}, [line]) == f"{line}\n"
    library.write_bytes(b"changed")
    with pytest.raises(CodegenError, match=f"pin is {line}, but the library came out as {name}@"):
        manifest.pins({name: library}, [line])
    with pytest.raises(CodegenError, match="none at all"):
        manifest.pins({}, [line])
