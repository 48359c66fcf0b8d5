"""Importing deepep on a bare machine: no torch, no GPU, no driver, no kernel library (D21)."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import deepep
import pytest

PACKAGE_ROOT = Path(deepep.__file__).parent.parent

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "numpy", "mpi4py", "ctypes"}:
            raise ImportError(f"{name} is blocked")
        if name == "deepep._runtime":
            raise ImportError(f"{name} is blocked")
        return None

sys.meta_path.insert(0, Blocker())
"""


def run_blocked(code: str) -> str:
    """Runs `code` in a fresh interpreter where torch and friends cannot be imported."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r})\n{BLOCKER}\n{code}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_version_and_planning_work_without_torch() -> None:
    out = run_blocked(
        """
import deepep
print(deepep.__version__)
print(deepep.Config(24).num_sms)
from deepep.config import default_dispatch_config
print(default_dispatch_config(12).num_max_nvl_chunked_send_tokens)
from deepep import fp8, groups, registry, sizes, topology
print(topology.expert_range(10, 4, 0))
print(fp8.scale_layout(2, 2880).shape)
print(groups.wrap().size())
print(sizes.receive_layout(1, 512, 2, 0, 8).total)
deepep.EventOverlap()
deepep.EventHandle().current_stream_wait()
print(issubclass(deepep.CommTimeoutError, TimeoutError))
"""
    )
    assert out.split("\n")[:8] == [
        deepep.__version__,
        "24",
        "36",
        "range(0, 3)",
        "(2, 23)",
        "1",
        "1124",
        "True",
    ]


def test_import_loads_nothing_heavy() -> None:
    out = run_blocked(
        """
import deepep
print(sorted(name for name in sys.modules if name.startswith("deepep")))
"""
    )
    assert out.strip() == "['deepep', 'deepep.version']"


def test_selection_without_torch_refuses_several_nodes_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEEPEP_VARIANT_PATH", raising=False)
    out = run_blocked(
        f"""
from pathlib import Path
from deepep import registry
from deepep.topology import Requirement
(Path({str(tmp_path)!r}) / "manifest.json").write_text(
    '{{"format": 1, "abi_version": 3, "variants": []}}')
try:
    registry.select(Requirement("internode", "sm90", 7168, "bf16", 16, 2),
                    directories=[Path({str(tmp_path)!r})])
except ValueError as error:
    print(type(error).__name__, error)
"""
    )
    assert "UnsupportedConfigError" in out
    assert "internode_sm90_h7168_bf16_r8x2" in out
    assert "gen_variants" in out


def test_every_public_name_has_a_home() -> None:
    for name, home in deepep._HOMES.items():
        if name == "Buffer" and importlib.util.find_spec("deepep._runtime") is None:
            continue  # Run from a source tree without the built native module.
        assert getattr(deepep, name) is getattr(importlib.import_module(f"deepep.{home}"), name)
    assert set(deepep.__all__) <= set(dir(deepep))


def test_index_type_is_the_one_of_v1() -> None:
    import torch

    assert deepep.topk_idx_t is torch.int64


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Bufer'"):
        deepep.Bufer  # noqa: B018


def test_the_doctor_examines_a_bare_machine() -> None:
    out = run_blocked(
        """
from deepep.doctor.__main__ import main
print("exit code", main(["--hidden", "7168", "--ranks", "4x2", "--topology", "internode"]))
"""
    )
    assert "PROBLEM  torch: torch cannot be imported: torch is blocked" in out
    assert "PROBLEM  runtime: deepep._runtime cannot be imported" in out
    # Several nodes: the missing library, and the package to add.
    assert "libnvshmem_host.so.3 is not installed" in out
    assert "pip install nvidia-nvshmem-cu13" in out
    assert out.endswith("exit code 1\n")
