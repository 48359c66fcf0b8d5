"""Every line is in its room: what may be said where, over all tracked files of the repository.

Templates have rules of their own, see tests/codegen/templates_test.py. The lists below are the
rooms; a list that names what is no longer there fails as well.
"""

import ast
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

# The tree itself, not Bazel's links to a part of it.
ROOT = Path(__file__).resolve().parent.parent

MAX_LINES, MEDIAN_LINES = 400, 150
CPP = {".c", ".cc", ".cu", ".cuh", ".h"}
SOURCE_SUFFIXES = CPP | {".py", ".bzl", ".j2", ".sh"}

# Files that show a variant's name as an example, in a comment or a message.
EXAMPLES = {
    "codegen/__main__.py",
    "codegen/variant.py",
    "kernels/BUILD.bazel",
    "kernels/abi/deepep_kernel.h",
    "python/deepep/manifest.py",
    "tools/build/deepep_kernel.bzl",
}
VARIANT_NAME = re.compile(
    r"\b(intranode|lowlatency|internode)_(host|sm\d+)_h(\d+|any)_(bf16|fp8)_r(\d+(x\d+)?|any)\b"
)

# Modules that are about tensors, and modules that import torch only when a function needs it.
TORCH = {
    *("arguments", "autograd", "blocks", "buffer", "cuda_engine", "devices", "engine", "reference"),
    *("internode", "operator_routing"),
    *("low_latency", "low_latency_calls", "low_latency_operators", "low_latency_reference"),
    *("nn", "operators", "ops", "permute", "pipeline", "receive", "routing", "throughput"),
    *("quickstart/batches", "quickstart/check", "quickstart/compare"),
    *("quickstart/model", "quickstart/rank", "quickstart/reference"),
}
TORCH_LATE = {"__init__", "events", "fp8", "groups", "handles", "spawn", "workspace"}
TORCH_LATE |= {"internode_handle"}

# What only some files may speak of: (suffixes, words, where they may stand).
ROOMS: dict[str, tuple[set[str], re.Pattern[str], tuple[str, ...]]] = {
    "PTX": (CPP, re.compile(r"\basm\b"), ("kernels/device/arch/*",)),
    "CUDA built-ins": (
        CPP,
        re.compile(r"\b(threadIdx|blockIdx|__syncthreads|__syncwarp|__ldg|atomic[A-Z]\w+)\b"),
        ("kernels/device/arch/*",),
    ),
    "the order of memory accesses": (
        CPP,
        re.compile(r"__atomic_\w+|__ATOMIC_|std::atomic|memory_order"),
        ("kernels/device/arch/*", "kernels/runtime/*", "tests/*"),
    ),
    "NVSHMEM": (
        CPP | {".py"},
        re.compile("nvshmem", re.IGNORECASE),
        (
            *("codegen/variant.py", "python/deepep/doctor/*", "python/deepep/environment.py"),
            *("python/deepep/refusal.py", "python/deepep/host_library.py", "tests/*"),
            *("python/deepep/gpu_network.py", "kernels/device/arch/gpu_network.cuh"),
            "kernels/host/gpu_network_entry.h",
        ),
    ),
    "the CUDA driver": (
        CPP,
        re.compile(r"\bdl(open|sym)\("),
        ("kernels/runtime/cuda_driver.cc", "kernels/runtime/library.cc", "tests/kernels/runtime/*"),
    ),
    "Python's C interface": (
        CPP,
        re.compile("pybind11|Python.h"),
        ("kernels/runtime/module.cc", "kernels/runtime/bind_arguments.h"),
    ),
    "ctypes": ({".py"}, re.compile(r"^\s*(import|from) ctypes", re.MULTILINE), ()),
    "a choice by one shape": (
        {".py"},
        re.compile(r"\b(hidden|num_ranks) == [1-9][0-9]+\b"),
        ("tests/*",),
    ),
}

ABSOLUTE = re.compile(r"(?<![\w.}])/(root|home|Users|mnt|tmp|work|srv|scratch)/\w")
REGISTRIES = re.compile(
    r"\b(pypi\.org|pythonhosted\.org|docker\.io|ghcr\.io|quay\.io|nvcr\.io|npmjs\.\w+|conda\.io)\b"
)
UNOWNED = re.compile(r"\b(TO" r"DO(?!\()|FIX" r"ME|XX" r"X)\b")
DATA = re.compile(r"^third_party/.*(lock\.bzl|requirements\.txt)$|/data/|^LICENSE$")

# Sources whose test is not named like them: {file or pattern: test, or the reason for none}.
TWINS = {
    "codegen/__init__.py": "empty of code",
    "codegen/__main__.py": "tests/codegen/cli_test.py",
    "kernels/abi/deepep_lowlatency.h": "tests/kernels/abi/deepep_lowlatency_test.c",
    "kernels/abi/*": "tests/kernels/abi/deepep_kernel_test.c",
    "kernels/device/*": "tests/kernels/host_protocol_test.cc",
    "kernels/device/arch/e4m3.h": "tests/distributed/low_latency_test.py",
    "kernels/device/lowlatency/*": "tests/kernels/host_lowlatency_test.cc",
    "kernels/device/arch/*.cuh": "runs on GPUs only; tests/distributed/cases.py has their cases",
    "kernels/host/lowlatency_checks.h": "tests/distributed/low_latency_test.py",
    "kernels/host/*": "tests/python/deepep/library_checks_test.py",
    "kernels/runtime/*": "tests/distributed/memory_test.py",
    "kernels/runtime/cuda_driver.*": "tests/kernels/runtime/exports_test.cc",
    "python/deep_ep/*": "tests/python/deep_ep/alias_test.py",
    "python/deepep/arguments.py": "tests/python/deepep/refusals_test.py",
    "python/deepep/devices.py": "tests/python/deepep/refusals_test.py",
    "python/deepep/doctor/*": "tests/python/deepep/doctor_test.py",
    "python/deepep/engine.py": "tests/distributed/faults_test.py",
    "python/deepep/__init__.py": "tests/python/deepep/import_test.py",
    "python/deepep/low_latency_operators.py": "tests/python/deepep/low_latency_ops_test.py",
    "python/deepep/low_latency*.py": "tests/distributed/low_latency_test.py",
    "kernels/abi/deepep_internode.h": "tests/kernels/abi/deepep_internode_test.c",
    "kernels/device/internode/*": "tests/kernels/internode_schedules_test.cc",
    "kernels/host/internode_checks.h": "tests/distributed/internode_test.py",
    "kernels/runtime/network.*": "tests/kernels/host_internode_test.cc",
    "python/deepep/contact.py": "tests/distributed/contact_test.py",
    "python/deepep/internode*.py": "tests/distributed/internode_test.py",
    "python/deepep/loading.py": "tests/python/deepep/library_checks_test.py",
    "python/deepep/gpu_network.py": "tests/gpu/internode_test.py",
    "kernels/host/gpu_network_entry.h": "tests/gpu/internode_test.py",
    "python/deepep/network.py": "tests/distributed/internode_test.py",
    "python/deepep/manifest.py": "tests/python/deepep/registry_test.py",
    "python/deepep/operator_routing.py": "tests/python/deepep/ops_test.py",
    "python/deepep/operators.py": "tests/python/deepep/ops_test.py",
    "python/deepep/part.py": "tests/python/deepep/buffer_test.py",
    "python/deepep/quickstart/*": "tests/python/deepep/quickstart_test.py",
    "python/deepep/refusal.py": "tests/python/deepep/registry_test.py",
    "python/deepep/routing.py": "tests/distributed/intranode_test.py",
    "python/deepep/spawn.py": "tests/python/deepep/testing_test.py",
    "python/deepep/throughput.py": "tests/distributed/intranode_test.py",
    "python/deepep/variants.py": "tests/python/deepep/listing_test.py",
    "python/deepep/version.py": "one number",
    "tools/*": "run by people and by the build, on the tree itself",
}


def tracked() -> list[str]:
    """All files that git tracks; all that are there where there is no git (a source archive)."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    try:
        listed = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        names = [name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        names = [str(path) for path in found if not path.parts[0].startswith((".", "bazel-"))]
    return sorted(name for name in names if (ROOT / name).is_file())


FILES = tracked()
TEXTS = {name: (ROOT / name).read_text(errors="replace") for name in FILES}
SOURCES = [name for name in FILES if Path(name).suffix in SOURCE_SUFFIXES and not DATA.search(name)]


def lines_with(pattern: re.Pattern[str], text: str) -> Iterator[int]:
    for found in pattern.finditer(text):
        yield text.count("\n", 0, found.start()) + 1


# ---- Rules: (file, text) -> what it breaks


def names_variants(name: str, text: str) -> Iterator[str]:
    told = ("tests/", "docs/", "tools/bench/results/")  # results say what was measured
    if name == "kernels/variants.bzl" or name in EXAMPLES or name.startswith(told):
        return
    if Path(name).name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        return
    for line in lines_with(VARIANT_NAME, text):
        yield f"{name}:{line} names a variant; only kernels/variants.bzl does"


def leaves_its_room(name: str, text: str) -> Iterator[str]:
    if name == "tests/rooms_test.py":
        return
    for what, (suffixes, words, allowed) in ROOMS.items():
        if Path(name).suffix in suffixes and not any(fnmatch(name, place) for place in allowed):
            for line in lines_with(words, text):
                yield f"{name}:{line} speaks of {what}, which belongs in {allowed or 'no file'}"


def imports_torch(name: str, text: str) -> Iterator[str]:
    if not name.endswith(".py") or not name.startswith(("codegen/", "python/", "tools/")):
        return
    if name.startswith("tools/bench/"):  # all of it is about tensors
        return
    module = name.removeprefix("python/deepep/").removesuffix(".py")
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported = [node.module or ""]
        else:
            continue
        if any(item.split(".")[0] == "torch" for item in imported):
            room = TORCH if node in tree.body else TORCH | TORCH_LATE
            if module not in room:
                yield f"{name}:{node.lineno} imports torch; add it to the list, or keep it out"


def names_a_place(name: str, text: str) -> Iterator[str]:
    for line in lines_with(ABSOLUTE, text):
        yield f"{name}:{line} has a path of one machine"
    for line in lines_with(REGISTRIES, text):
        yield f"{name}:{line} names a registry; the user's own settings choose it"


def is_unkempt(name: str, text: str) -> Iterator[str]:
    if Path(name).suffix not in SOURCE_SUFFIXES or DATA.search(name):
        return
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        yield f"{name} has {len(lines)} lines, at most {MAX_LINES}: split it by concern"
    start = "\n".join(lines[:3]).lstrip()
    if lines and not start.startswith(('"""', "//", "/*", "#", "{%", "{#", "load(")):
        yield f"{name} does not begin with a line that says what it is"
    for line in lines_with(UNOWNED, text):
        yield f"{name}:{line} leaves work without an owner or issue: name one in parentheses"


RULES = [names_variants, leaves_its_room, imports_torch, names_a_place, is_unkempt]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Callable[[str, str], Iterator[str]]) -> None:
    assert [broken for name, text in TEXTS.items() for broken in rule(name, text)] == []


PLANTED = [
    (names_variants, "python/deepep/buffer.py", 'if name == "intranode_sm90_h7168_fp8_r8":'),
    (names_variants, "kernels/device/x.h", "// intranode_host_hany_bf16_rany only"),
    (leaves_its_room, "kernels/device/intranode/x.h", 'asm volatile("");'),
    (leaves_its_room, "kernels/device/operation.h", "__atomic_load_n(p, __ATOMIC_RELAXED)"),
    (leaves_its_room, "kernels/device/intranode/x.h", "if (threadIdx.x == 0) {"),
    (leaves_its_room, "kernels/runtime/pool.cc", "#include <nvshmem.h>"),
    (leaves_its_room, "kernels/runtime/pool.cc", "#include <pybind11/pybind11.h>"),
    (leaves_its_room, "python/deepep/engine.py", "    import ctypes"),
    (leaves_its_room, "python/deepep/registry.py", "if hidden == 7168:"),
    (imports_torch, "python/deepep/config.py", "def f():\n    import torch"),
    (imports_torch, "python/deepep/fp8.py", "import torch"),
    (imports_torch, "codegen/render.py", "from torch import nn"),
    (names_a_place, "docs/x.md", "see /home/" + "me/project"),
    (names_a_place, "tools/x.sh", "pip install --index-url https://pypi" + ".org/simple"),
    (is_unkempt, "codegen/x.py", '"""Long."""\n' * 401),
    (is_unkempt, "codegen/x.py", "import os\n"),
    (is_unkempt, "codegen/x.py", '"""Doc."""\n# TO' + "DO later\n"),
]


@pytest.mark.parametrize(("rule", "name", "text"), PLANTED)
def test_a_violation_is_seen(
    rule: Callable[[str, str], Iterator[str]], name: str, text: str
) -> None:
    assert list(rule(name, text))


def test_half_of_the_files_are_short() -> None:
    lengths = [len(TEXTS[name].splitlines()) for name in SOURCES if not name.startswith("tests/")]
    assert statistics.median(lengths) <= MEDIAN_LINES


# ---- Every source has a test


def twin_of(name: str) -> str:
    """The test that is named like a source."""
    return f"tests/{Path(name).with_suffix('')}_test.py"


def entry_of(name: str) -> str | None:
    """The most exact entry of TWINS for a source."""
    return max((entry for entry in TWINS if fnmatch(name, entry)), key=len, default=None)


TESTED = [
    name
    for name in SOURCES
    if not name.startswith(("tests/", "codegen/templates/", "third_party/", "tools/build/"))
    and Path(name).suffix not in {".bzl", ".sh"}
]


def test_every_source_has_a_test_or_a_reason() -> None:
    missing = [name for name in TESTED if twin_of(name) not in TEXTS and entry_of(name) is None]
    assert missing == [], "write a test named like the source, or add an entry to TWINS"


def test_the_list_of_other_tests_is_true() -> None:
    for entry, test in TWINS.items():
        served = [name for name in TESTED if entry_of(name) == entry]
        assert any(twin_of(name) not in TEXTS for name in served), f"{entry} is not needed"
        assert test in TEXTS or not test.startswith("tests/") or "; " in test, f"{test} is missing"


def test_the_rooms_are_not_empty() -> None:
    assert {"WORKSPACE", "kernels/variants.bzl"} <= TEXTS.keys(), f"{ROOT} is not the whole tree"
    for module in TORCH | TORCH_LATE:
        assert "torch" in TEXTS.get(f"python/deepep/{module}.py", ""), f"{module} needs no torch"
    for name in EXAMPLES:
        assert VARIANT_NAME.search(TEXTS.get(name, "")), f"{name} shows no variant's name"
