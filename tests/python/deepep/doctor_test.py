"""The doctor on machines that are not here: their files, programs and packages are mocked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepep import registry
from deepep.doctor import checks, network, nvidia, shape
from deepep.doctor.__main__ import main
from deepep.doctor.facts import Facts, Nic, Torch, gather
from deepep.doctor.finding import Finding
from deepep.doctor.machine import Machine
from deepep.doctor.nvidia import Gpu, Link
from deepep.manifest import VariantEntry

H200 = ", NVIDIA H200, 9.0, 143771, 143000, Default, Disabled\n"
QUERY = f"nvidia-smi --query-gpu={nvidia._COLUMNS} --format=csv,noheader,nounits"
SMI = "| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: 13.0 |\n"
WAYS = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tSYS\t0-47\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t0-47\t0\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
ACCESS = """\
 \tGPU0\tGPU1\tGPU2
 GPU0\tX\tOK\tNS
 GPU1\tOK\tX\tOK
 GPU2\tNS\tOK\tX
"""


@dataclass
class Mock(Machine):
    """A machine made of the given answers."""

    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    packages: dict[str, tuple[str, str]] = field(default_factory=dict)
    sharing: str | None = None

    def environment(self) -> Mapping[str, str]:
        return self.variables

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def exists(self, path: str) -> bool:
        return path in self.files

    def names(self, folder: str) -> list[str]:
        inside = [path for path in self.files if path.startswith(f"{folder}/")]
        return sorted({path.removeprefix(f"{folder}/").split("/")[0] for path in inside})

    def link(self, path: str) -> str | None:
        return self.files.get(path)

    def output(self, command: Sequence[str]) -> str | None:
        return self.outputs.get(" ".join(command))

    def module(self, name: str) -> Any:
        if name not in self.modules:
            raise ImportError(f"no module named {name}")
        return self.modules[name]

    def package(self, name: str) -> tuple[str, str] | None:
        return self.packages.get(name)

    def sharing_error(self) -> str | None:
        return self.sharing


def torch_with(num_gpus: int, cuda: str | None = "13.0") -> SimpleNamespace:
    seen = SimpleNamespace(is_available=lambda: num_gpus > 0, device_count=lambda: num_gpus)
    version = SimpleNamespace(cuda=cuda)
    return SimpleNamespace(__version__="2.9.0", version=version, cuda=seen)


def gpu_machine() -> Mock:
    return Mock(
        files={
            "/proc/meminfo": "MemTotal:  33554432 kB\nMemAvailable:  16777216 kB\n",
            "/sys/fs/cgroup/memory.max": "max\n",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(8 << 30),
            "/proc/driver/nvidia/params": 'RegistryDwords: "PeerMappingOverride=1;"\n',
            "/sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
            "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "/dev/gdrdrv": "",
        },
        outputs={
            "nvidia-smi": SMI,
            QUERY: "0" + H200 + "1" + H200 + "2" + H200,
            "nvidia-smi topo -m": WAYS,
            "nvidia-smi topo -p2p r": ACCESS,
        },
        modules={"torch": torch_with(3), "deepep._runtime": SimpleNamespace()},
        packages={"nvidia-nvshmem-cu13": ("3.4.5", "site-packages")},
    )


def library(name: str, **toolchain: str) -> VariantEntry:
    topology, arch, hidden, dtype, ranks = name.split("_")
    return VariantEntry(
        name=name,
        topology=topology,
        arch=arch,
        hidden=0 if hidden == "hany" else int(hidden[1:]),
        dtype=dtype,
        num_ranks=0 if ranks == "rany" else int(ranks[1:]),
        num_nodes=1,
        library=f"libdeepep_{name}.so",
        sha256="0" * 64,
        directory=Path("lib"),
        toolchain=toolchain,
    )


SM90 = library("intranode_sm90_hany_bf16_rany", nvcc="13.0.88")
SM80 = library("intranode_sm80_hany_bf16_rany", nvcc="13.0.88")
HOST = library("intranode_host_hany_bf16_rany")


def found(findings: list[Finding], level: str) -> str:
    """The texts of one level with their cures; each problem and warning has a cure."""
    assert all(each.remedy for each in findings if each.level in ("problem", "warning"))
    return "\n".join(f"{each.text} -> {each.remedy}" for each in findings if each.level == level)


@pytest.fixture
def facts() -> Facts:
    """The machine of gpu_machine(), with libraries for it."""
    return replace(gather(gpu_machine()), libraries=(HOST, SM80, SM90), libraries_error="")


def test_facts_are_read_from_files_and_programs(facts: Facts) -> None:
    assert (facts.driver, facts.driver_cuda) == ("580.65.06", "13.0")
    assert facts.gpus[2] == Gpu(2, "NVIDIA H200", (9, 0), 143771 << 20, 143000 << 20)
    assert facts.links == (
        Link(0, 1, True, "NV18"),
        Link(0, 2, False, "SYS"),
        Link(1, 2, True, "SYS"),
    )
    assert facts.torch == Torch("2.9.0", "13.0", 3)
    assert (facts.memory_bytes, facts.free_bytes, facts.limit_bytes) == (
        32 << 30,
        16 << 30,
        8 << 30,
    )
    assert facts.nics == (Nic("mlx5_0/1", "InfiniBand", "ACTIVE"),)
    assert facts.peer_mapping and facts.gdrcopy and not facts.peermem
    assert facts.nvshmem == "3.4.5"


def test_a_good_machine_has_no_problem_and_names_slow_pairs(facts: Facts) -> None:
    findings = checks.examine(facts) + network.examine(facts, between_nodes=True)
    assert found(findings, "problem") == ""
    assert "cannot reach each other's memory: (0, 2)" in found(findings, "warning")
    assert "(1, 2) by SYS" in found(findings, "note")
    assert "GPU 0: NVIDIA H200, compute capability 9.0" in found(findings, "ok")


def test_a_machine_without_gpu_is_no_problem() -> None:
    bare = Mock(modules={"torch": torch_with(0, None), "deepep._runtime": SimpleNamespace()})
    facts = replace(gather(bare), libraries=(HOST,), libraries_error="")
    findings = checks.examine(facts) + network.examine(facts, between_nodes=False)
    assert found(findings, "problem") == found(findings, "warning") == ""
    assert "no NVIDIA driver" in found(findings, "note")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"torch": None, "torch_error": "libcudart.so"}, ["libcudart.so", "pip install torch"]),
        ({"runtime_error": "wrong ABI"}, ["wrong ABI", "//python:wheel"]),
        ({"libraries": ()}, ["no kernel library", "DEEPEP_VARIANT_PATH"]),
        ({"libraries": (), "libraries_error": "not JSON"}, ["not JSON"]),
        ({"changed_libraries": ("lib.so was changed",)}, ["lib.so was changed"]),
        ({"pins_error": "x is pinned but not built"}, ["x is pinned", "Unset DEEPEP_PIN"]),
        ({"sharing_error": "Permission denied"}, ["Permission denied", "PID namespace"]),
        ({"driver_cuda": "12.8"}, ["nvcc 13.x", "supports CUDA 12.8", "DEEPEP_CUDA_HOME"]),
        ({"torch": Torch("2.9", "", 0)}, ["torch sees none of the 3 GPUs", "pip install torch"]),
        (
            {"torch": Torch("2.9", "13.0", 0), "visible_gpus": "7"},
            ["CUDA_VISIBLE_DEVICES=7", "Unset"],
        ),
        ({"gpus": (Gpu(0, "A", (9, 0), compute_mode="Prohibited"),)}, ["-c DEFAULT"]),
    ],
)
def test_each_problem_has_its_cure(facts: Facts, change: dict[str, Any], words: list[str]) -> None:
    text = found(checks.examine(replace(facts, **change)), "problem")
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("gpu", "libraries", "words"),
    [
        (Gpu(0, "H200", (9, 0)), (HOST,), "no library for sm90 or sm80"),
        (Gpu(0, "H200", (9, 0)), (HOST, SM80), "sm80 runs, sm90 is better"),
        (Gpu(0, "A100", (8, 0), mig=True), (SM80,), "split by MIG"),
    ],
)
def test_gpus_and_libraries_that_do_not_match(
    facts: Facts, gpu: Gpu, libraries: tuple[VariantEntry, ...], words: str
) -> None:
    changed = replace(facts, gpus=(gpu,), libraries=libraries)
    assert words in found(checks.examine(changed), "warning")


def test_an_nvshmem_of_another_version_is_refused_with_both(facts: Facts) -> None:
    # D22: built for 3.4.5, the host library is 3.6.5.
    built = replace(SM90, name="internode_x", toolchain={"nvshmem": "3.4.5"})
    changed = replace(facts, nvshmem="3.6.5", nvshmem_folder="venv", libraries=(built,))
    text = found(network.examine(changed, between_nodes=True), "problem")
    for words in (
        "3.6.5 in venv",
        "built with 3.4.5",
        str(built.path),
        "nvidia-nvshmem-cu13==3.4.5",
    ):
        assert words in text
    # Inside a node nothing needs it.
    assert found(network.examine(changed, between_nodes=False), "problem") == ""
    same = network.examine(replace(changed, nvshmem="3.4.5.post1"), between_nodes=True)
    assert "kernel libraries were built with 3.4.5" in found(same, "ok")
    missing = replace(changed, nvshmem="", nics=())
    assert found(network.examine(missing, between_nodes=False), "problem") == ""
    text = found(network.examine(missing, between_nodes=True), "problem")
    assert "libnvshmem_host.so.3" in text and "no RDMA network card" in text


@pytest.fixture
def selectable(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> Facts:
    """The registry holds the libraries of the facts."""
    monkeypatch.delenv(registry.PIN_VARIABLE, raising=False)
    monkeypatch.setattr(registry, "variants", lambda directories=None: facts.libraries)
    monkeypatch.setattr(registry, "verify", lambda entry: None)
    return facts


def test_a_shape_gets_what_a_buffer_would_choose(selectable: Facts) -> None:
    findings, chosen = shape.examine(selectable, shape.Shape(7168, "bf16", 2))
    assert chosen == SM90.name
    assert "generic hidden and ranks" in found(findings, "ok")
    assert "one rank on each of GPUs 0, 1 " in found(findings, "ok")
    assert found(findings, "problem") == ""
    no_gpu = replace(selectable, torch=Torch("2.9", "", 0))
    assert shape.examine(no_gpu, shape.Shape(7168, "bf16", 2))[1] == HOST.name


def test_a_shape_that_does_not_fit_machine_or_libraries(selectable: Facts) -> None:
    # D08: an explicit choice is not replaced; the pairs without access are listed.
    findings, chosen = shape.examine(selectable, shape.Shape(7168, "bf16", 3, arch="sm80"))
    assert chosen == SM80.name
    assert "cannot reach each other's memory: (0, 2)" in found(findings, "problem")
    findings, chosen = shape.examine(selectable, shape.Shape(7168, "fp8", 2))
    assert chosen is None
    assert "//tools:gen_variants -- --hidden 7168 --dtype fp8" in found(findings, "problem")
    findings, _ = shape.examine(selectable, shape.Shape(7, "bf16", 2))
    assert "multiple of 16 bytes" in found(findings, "problem")
    assert "-> Pad hidden to 8." in found(findings, "problem")


def test_nodes_on_the_cpu_need_no_network(
    selectable: Facts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rails = replace(HOST, name="internode_host_hany_bf16_rany", topology="internode", num_nodes=0)
    monkeypatch.setattr(registry, "variants", lambda directories=None: (rails,))
    bare = Mock(modules={"torch": torch_with(0, None), "deepep._runtime": SimpleNamespace()})
    asked = ["--topology", "internode", "--hidden", "512", "--ranks", "4x2"]
    assert main(asked, bare) == 0
    assert f"{rails.name}: generic hidden and ranks" in capsys.readouterr().out
    assert main([*asked, "--arch", "sm90"], bare) == 1
    assert "PROBLEM  NVSHMEM" in capsys.readouterr().out


def test_changed_libraries_and_pins_are_examined(
    facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / HOST.library).write_text("other bytes")
    damaged = replace(HOST, directory=tmp_path)
    monkeypatch.setattr(registry, "variants", lambda directories=None: (damaged,))
    monkeypatch.setenv(registry.PIN_VARIABLE, f"{HOST.name}@{'f' * 64}")
    examined = gather(gpu_machine())
    assert "was changed after it was built" in examined.changed_libraries[0]
    assert f"is pinned to sha256 {'f' * 64}" in examined.pins_error
    monkeypatch.setenv(registry.PIN_VARIABLE, HOST.name)
    text = found(checks.examine(gather(gpu_machine())), "ok")
    assert f"DEEPEP_PIN limits the choice to {HOST.name}" in text


def test_json_has_findings_facts_and_the_choice(
    selectable: Facts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--json", "--hidden", "512", "--ranks", "2"], gpu_machine()) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert document["chosen"] == SM90.name
    assert document["facts"]["gpus"][0]["name"] == "NVIDIA H200"
    assert {each["topic"] for each in document["findings"]} >= {"python", "GPU", "peers", "shape"}


def test_text_ends_with_the_count_and_the_exit_code_says_the_same(
    selectable: Facts, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = gpu_machine()
    machine.sharing = "Permission denied"
    assert main([], machine) == 1
    out = capsys.readouterr().out
    assert "PROBLEM  processes: " in out
    assert out.endswith("1 problem\n")
    with pytest.raises(SystemExit) as caught:
        main(["--ranks", "8y4"])
    assert caught.value.code == 2


def test_this_machine_can_be_examined() -> None:
    facts = gather(Machine())
    assert facts.sharing_error == ""
    assert facts.memory_bytes > facts.free_bytes > 0
    assert Machine().output(["no-such-program"]) is None
    assert Machine().read("/no/such/file") is None
    assert Machine().package("no-such-package") is None
