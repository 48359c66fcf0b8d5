"""What Bazel must know before codegen can run is what codegen says."""

import ast
from pathlib import Path
from typing import Any

from codegen.arch import ARCHS
from codegen.render import output_path
from codegen.table import read_table
from codegen.variant import UNITS

BUILD = Path(__file__).parent.parent.parent / "tools" / "build"


def literal(file: str, name: str) -> Any:
    """Return the literal that a Starlark file gives a global name."""
    for node in ast.parse((BUILD / file).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{file} does not define {name}; correct this test")


def test_nvcc_gets_the_architectures_of_codegen() -> None:
    gpus = {arch.name: arch.gencode for arch in ARCHS.values() if arch.gencode}
    assert literal("cuda_kernel.bzl", "_GENCODE") == gpus


def test_bazel_declares_the_units_of_codegen() -> None:
    units = {topology: tuple(names) for topology, names in UNITS.items()}
    bazel = literal("deepep_kernel.bzl", "_UNITS")
    assert {topology: tuple(names) for topology, names in bazel.items()} == units


def test_host_sources_are_cc_and_gpu_sources_cu() -> None:
    for variant in read_table():
        suffix = "cc" if variant.is_host else "cu"  # As rendered_files() of deepep_kernel.bzl.
        assert output_path(variant, "variant") == f"{variant.name}/variant.{suffix}"
