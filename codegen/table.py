"""Reads kernels/variants.bzl, the one table of what is built, without Bazel.

Starlark is almost a subset of Python; the table keeps to what both read alike, so Python runs it.
"""

import builtins
from pathlib import Path
from typing import Any

from codegen.errors import CodegenError
from codegen.variant import Variant

TABLE = Path(__file__).parent.parent / "kernels" / "variants.bzl"

# What the table may call. The list keeps the file portable; it is no sandbox: the file is ours.
_SHARED = ("dict", "enumerate", "len", "list", "max", "min", "range", "sorted", "str", "zip")


def read_table(path: Path = TABLE, variable: str = "VARIANTS") -> list[Variant]:
    """Return the variants of a table, in its order; each name is legal and there once."""
    return parse_table(path.read_bytes(), variable, path)


def parse_table(content: str | bytes, variable: str, path: Path) -> list[Variant]:
    """The same of a table's content, before it is written to `path`."""
    return _variants(_run(content, path).get(variable), variable, path)


def read_sets(path: Path = TABLE) -> dict[str, list[Variant]]:
    """Return the table's SETS: the variants of each set that --kernels= chooses from."""
    sets = _run(path.read_bytes(), path).get("SETS")
    if not isinstance(sets, dict):
        raise CodegenError(
            f"SETS of {path} is {type(sets).__name__}, but must be a dict of lists of variant "
            "names; define SETS = {...} at the top level of the file"
        )
    return {name: _variants(names, f"SETS[{name!r}]", path) for name, names in sets.items()}


def _variants(names: object, variable: str, path: Path) -> list[Variant]:
    """Parse one list of the table."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CodegenError(
            f"{variable} of {path} is {type(names).__name__}, but must be a list of variant names; "
            f"define {variable} = [...] at the top level of the file"
        )
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise CodegenError(
            f"{variable} of {path} has {', '.join(repeated)} more than once, but a name is one "
            "build target; remove the repetitions"
        )
    return [Variant.parse(name) for name in names]


def _run(content: str | bytes, path: Path) -> dict[str, Any]:
    """Execute the file's content and return its global variables."""
    shared = {name: getattr(builtins, name) for name in _SHARED}
    scope: dict[str, Any] = {"__builtins__": shared, "fail": _fail}
    try:
        exec(compile(content, str(path), "exec"), scope)
    except CodegenError:  # By the table's own fail().
        raise
    except Exception as error:  # It is a program, and may stop in any way.
        raise CodegenError(
            f"table {path} cannot be read: {error}; keep it to what Starlark and Python share: "
            "no load(), no import, and only builtins that both have"
        ) from error
    return scope


def _fail(message: str) -> None:
    """Starlark's fail(), under the same name."""
    raise CodegenError(message)
