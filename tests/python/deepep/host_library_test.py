"""A kernel library and an NVSHMEM of different versions are refused when a Buffer is made (D22).

The libraries are made up: a CPU kernel library whose manifest says that it needs NVSHMEM 3.4.5,
and an installed package that is nothing but its version.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepep import Buffer, registry
from deepep.errors import KernelLoadError
from deepep.topology import Requirement

HIDDEN = 64


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the library that a Buffer of one rank takes, said to be built with 3.4.5."""
    real = registry.select(Requirement("intranode", "host", HIDDEN, "bf16", 1)).entry
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / real.path.name).write_bytes(real.path.read_bytes())
    document = json.loads((real.path.parent / "manifest.json").read_text())
    (row,) = (each for each in document["variants"] if each["name"] == real.name)
    row["toolchain"]["nvshmem"] = "3.4.5"
    (folder / "manifest.json").write_text(json.dumps({**document, "variants": [row]}))
    monkeypatch.setenv("DEEPEP_VARIANT_PATH", str(folder))
    monkeypatch.delenv("DEEPEP_ALLOW_NVSHMEM_MISMATCH", raising=False)
    return folder / real.path.name


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Installs the package in one version; returns its host library."""

    def install_version(version: str) -> Path:
        site = tmp_path / "site"
        facts = site / f"nvidia_nvshmem_cu13-{version}.dist-info"
        facts.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: nvidia-nvshmem-cu13\nVersion: {version}\n"
        (facts / "METADATA").write_text(text)
        monkeypatch.setattr(sys, "path", [str(site), *sys.path])
        return site / "nvidia" / "nvshmem" / "lib" / "libnvshmem_host.so.3"

    return install_version


def round_trip() -> None:
    x = torch.randn((3, HIDDEN)).to(torch.bfloat16)
    ids = torch.zeros((3, 1), dtype=torch.int64)
    with Buffer(device="cpu", hidden=HIDDEN) as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 1)
        rows, *_ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        assert isinstance(rows, torch.Tensor) and torch.equal(rows, x)


def test_a_mixed_pair_is_refused_when_a_buffer_is_made(
    built: Path, install: Callable[[str], Path]
) -> None:
    host = install("3.6.5")
    with pytest.raises(KernelLoadError) as caught:
        Buffer(device="cpu", hidden=HIDDEN)
    for words in (
        f"{built} was built with NVSHMEM 3.4.5",
        f"the host library {host} is 3.6.5",
        "pip install nvidia-nvshmem-cu13==3.4.5",
        "DEEPEP_NVSHMEM_HOME",
        "DEEPEP_ALLOW_NVSHMEM_MISMATCH=1",
    ):
        assert words in str(caught.value)


def test_the_override_makes_it_a_warning(
    built: Path, install: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("3.6.5")
    monkeypatch.setenv("DEEPEP_ALLOW_NVSHMEM_MISMATCH", "1")
    with pytest.warns(RuntimeWarning, match=r"3\.4\.5.*3\.6\.5.*ALLOW_NVSHMEM_MISMATCH"):
        round_trip()


@pytest.mark.parametrize("version", ["3.4.5", "3.4.5.1"])
def test_the_same_version_is_taken(
    built: Path, install: Callable[[str], Path], version: str
) -> None:
    install(version)
    round_trip()


def test_libraries_that_need_none_do_not_look(install: Callable[[str], Path]) -> None:
    install("3.6.5")
    round_trip()
