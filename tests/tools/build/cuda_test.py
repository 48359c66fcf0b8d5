"""What the repository @cuda refuses when it is configured, before anything is compiled.

The rule is Starlark, which is Python enough to be run here on a machine that is made up.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

RULES = Path(__file__).parent.parent.parent.parent / "tools" / "build" / "cuda.bzl"
LOCK = {
    "nvidia_cuda_nvcc": {"dist": "nvidia-cuda-nvcc", "version": "13.0.88", "hashes": []},
    "nvidia_nvshmem_cu13": {"dist": "nvidia-nvshmem-cu13", "version": "3.4.5", "hashes": []},
}
HEADER = """
#define NVSHMEM_VENDOR_MAJOR_VERSION 3
#define NVSHMEM_VENDOR_MINOR_VERSION 4
#define NVSHMEM_VENDOR_PATCH_VERSION 5
#define NVSHMEM_BUILD_VARS "NVSHMEM_DEBUG=OFF {toolkit}GDRCOPY_HOME=/usr/r9.9"
"""


class RefusedError(Exception):
    pass


def refuse(text: str) -> None:
    raise RefusedError(text)


class Context:
    """A repository rule's context over a made-up toolkit."""

    def __init__(self, nvcc: str, toolkit: str, environ: dict[str, str]) -> None:
        self.attr = SimpleNamespace(lock=json.dumps(LOCK))
        self.os = SimpleNamespace(environ=environ)
        self.written: dict[str, str] = {}
        self.version = f"Cuda compilation tools, release 1, V{nvcc}\nBuild"
        self.header = HEADER.format(toolkit=toolkit)

    def read(self, path: str) -> str:
        assert path.endswith("nvshmem_version.h")
        return self.header

    def path(self, path: str) -> SimpleNamespace:
        return SimpleNamespace(exists=True)

    def symlink(self, target: str, link: str) -> None:
        self.written[link] = target

    def file(self, path: str, text: str) -> None:
        self.written[path] = text

    def report_progress(self, text: str) -> None:
        pass

    def execute(self, command: list[str]) -> SimpleNamespace:
        assert command == ["cuda/bin/nvcc", "--version"]
        return SimpleNamespace(return_code=0, stdout=self.version)


def configure(
    nvcc: str, toolkit: str = "", machine: str = "", **environ: str
) -> tuple[list[str], Context]:
    """Runs the rule; returns the wheels that were fetched, and what was made."""
    fetched: list[str] = []

    def pip_install(context: Any, wheels: Any, target: str) -> str:
        fetched.extend(wheels)
        return ""

    names: dict[str, Any] = {
        "load": lambda *names: None,
        "provider": lambda **kwargs: None,
        "rule": lambda **kwargs: None,
        "repository_rule": lambda **kwargs: None,
        "attr": SimpleNamespace(
            **{kind: lambda **kwargs: None for kind in ("label", "label_list", "string")}
        ),
        "json": SimpleNamespace(decode=json.loads),
        "fail": refuse,
        "foreign_machine": lambda context: machine,
        "pinned": lambda dist, version, hashes: f"{dist}=={version}",
        "pip_install": pip_install,
    }
    exec(compile(RULES.read_text(encoding="utf-8"), str(RULES), "exec"), names)
    context = Context(nvcc, toolkit, environ)
    names["_cuda_toolkit_impl"](context)
    return fetched, context


def test_pinned_wheels_are_taken_together() -> None:
    fetched, context = configure("13.0.88")
    assert fetched == ["nvidia-cuda-nvcc==13.0.88", "nvidia-nvshmem-cu13==3.4.5"]
    assert 'nvcc_version = "13.0.88"' in context.written["BUILD"]
    assert 'nvshmem_version = "3.4.5"' in context.written["BUILD"]


CUDA_12 = {"DEEPEP_CUDA_HOME": "/opt/cuda-12.4"}
NVSHMEM = {"DEEPEP_NVSHMEM_HOME": "/opt/nvshmem"}


def test_a_toolkit_of_another_major_version_stops_at_configure() -> None:
    """D24: nvcc 12, NVSHMEM for CUDA 13."""
    with pytest.raises(RefusedError) as caught:
        configure("12.4.131", **CUDA_12)
    for words in (
        "nvcc is 12.4.131 (DEEPEP_CUDA_HOME=/opt/cuda-12.4)",
        "NVSHMEM (pinned wheels) was built for CUDA 13",
        "Set DEEPEP_NVSHMEM_HOME to an NVSHMEM for CUDA 12",
        "or DEEPEP_CUDA_HOME to a toolkit 13",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize("built", ["CUDA_HOME=/build/r13.0/cuda ", "CUDA_HOME=/usr/cuda-13.1 "])
def test_an_installed_nvshmem_says_what_it_was_built_for(built: str) -> None:
    with pytest.raises(
        RefusedError, match=r"DEEPEP_NVSHMEM_HOME=/opt/nvshmem\) was built for CUDA 13"
    ):
        configure("12.4.131", built, **CUDA_12, **NVSHMEM)
    assert configure("13.0.88", built, **CUDA_12, **NVSHMEM)[0] == []


@pytest.mark.parametrize("built", ["", "CUDA_HOME=/usr/local/cuda ", "CUDA_HOME=/build/p4/12.x "])
def test_what_is_not_said_is_not_refused(built: str) -> None:
    fetched, context = configure("12.4.131", built, **CUDA_12, **NVSHMEM)
    assert fetched == [] and context.written["cuda"] == CUDA_12["DEEPEP_CUDA_HOME"]


def test_another_machine_is_told_before_anything_is_fetched() -> None:
    with pytest.raises(
        RefusedError, match=r"machine is aarch64, .*x86_64 only\. Set DEEPEP_CUDA_HOME"
    ):
        configure("13.0.88", machine="aarch64")
    assert configure("13.0.88", machine="aarch64", **CUDA_12, **NVSHMEM)[0] == []
