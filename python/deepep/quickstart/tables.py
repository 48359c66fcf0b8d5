"""Text for a terminal: aligned tables, and bars of one character each."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Columns two spaces apart, each line indented by two; right-aligned but those in `left`."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def bars(values: Sequence[float], highest: float) -> str:
    """One character for each value, from empty to full at `highest`."""
    blocks = "▁▂▃▄▅▆▇█"
    try:
        blocks.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        blocks = "_.-=+*%#"
    top = len(blocks) - 1
    return "".join(blocks[round(top * value / highest) if highest else 0] for value in values)


def spans(ranges: Sequence[range]) -> str:
    """'0-7, 8-15'."""
    return ", ".join(span(item) for item in ranges)


def span(items: range) -> str:
    """'0-7', or '3' for a single one."""
    if len(items) == 1:
        return str(items.start)
    return f"{items.start}-{items.stop - 1}"
