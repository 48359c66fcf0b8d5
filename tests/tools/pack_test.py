"""The package in a folder: what is taken from the wheel, and what is said without one."""

import json
import zipfile
from pathlib import Path

import pytest

from tools import pack


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "deepep-1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("deepep/__init__.py", "")
        archive.writestr("deepep/lib/manifest.json", json.dumps({"variants": [{"name": "v"}]}))
        archive.writestr("deepep-1.dist-info/METADATA", "")
    return path


def test_the_folder_holds_the_package_and_nothing_from_before(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "deepep").mkdir(parents=True)
    (tmp_path / "out" / "deepep" / "old.py").touch()
    (tmp_path / "out" / "other").touch()
    assert pack.unpack(wheel, tmp_path / "out") == ["v"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"deepep", "other"}
    assert {path.name for path in (tmp_path / "out" / "deepep").iterdir()} == {"__init__.py", "lib"}


def test_without_a_wheel_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pack, "__file__", str(tmp_path / "tools" / "pack.py"))
    with pytest.raises(FileNotFoundError, match=r"0 wheels in .*start this by ./bazelw run"):
        pack.built_wheel()
