"""Adds names to a table of variants: the list EXTRA of kernels/variants.bzl, or a user's own file.

Used by tools/gen_variants.py. The list keeps one name a line, sorted, each once; what stands around
it, comments too, stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from codegen.errors import CodegenError
from codegen.table import parse_table, read_table
from codegen.variant import Variant

EXTRA = "EXTRA"  # The list of the repository's table that rows are added to.
OWN = "VARIANTS"  # The list of a user's table.

_NEW_TABLE = '''\
"""Our own variants. DEEPEP_VARIANTS=<this file> builds them; see docs/variants.md of deepep."""

VARIANTS = [
]
'''


def sort_key(variant: Variant) -> tuple[str, str, int, str, int, int]:
    """Orders rows as people read them: numbers by their value."""
    v = variant
    return v.topology, v.arch, v.hidden, v.dtype, v.num_ranks, v.num_nodes


def names(path: Path, variable: str) -> list[str]:
    """The names that a list of the table holds; none when there is no such file yet."""
    if not path.exists():
        return []
    return [variant.name for variant in read_table(path, variable)]


def with_rows(text: str, variable: str, rows: Iterable[Variant], where: str) -> str:
    """Return the table's text with `rows` as the whole content of the list `variable`.

    Raises:
        CodegenError: the text has no such list, or the list has more than names in quotes.
    """
    found = re.search(rf"^{variable} *= *\[(?P<body>[^\]]*)\]", text, re.MULTILINE)
    plain = found and re.fullmatch(r'(\s*"[^"\n]*"\s*,?)*\s*', found["body"])
    if found is None or not plain:
        raise CodegenError(
            f"{variable} of {where} is not a plain list of names, so no row can be added; write it "
            f'as {variable} = [ with one "name", a line, then ], and comments outside of it'
        )
    lines = "".join(f'    "{variant.name}",\n' for variant in sorted(rows, key=sort_key))
    return f"{text[: found.start('body')]}\n{lines}{text[found.end('body') :]}"


def add(path: Path, variable: str, rows: Sequence[Variant], write: bool = True) -> str:
    """Add rows to a table's list; a file that is not there is begun. Returns the new text.

    Raises:
        CodegenError: as with_rows(), or the table or its new text is no legal table, or it cannot
            be written.
    """
    path = path.resolve()  # A link stays one.
    text = path.read_text(encoding="utf-8") if path.exists() else _NEW_TABLE
    kept = [Variant.parse(name) for name in names(path, variable)]
    changed = with_rows(text, variable, {*kept, *rows}, str(path))
    if set(parse_table(changed, variable, path)) != {*kept, *rows}:
        raise CodegenError(
            f"{variable} of {path} is set more than once, so a row that is added to the first list "
            f"does not count; keep one {variable} = [...]"
        )
    if write and changed != text:
        # In one step: a build that reads the table meanwhile sees the old or the new one.
        temporary = path.with_name(f".{path.name}.new")
        try:
            temporary.write_text(changed, encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            raise CodegenError(
                f"table {path} cannot be written: {error.strerror}; make its folder, or put it "
                "into one that you may write to (--table FILE)"
            ) from error
    return changed
