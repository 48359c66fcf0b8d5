"""Records as rows of text: what is the same in all of them is said once, above."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Record = dict[str, Any]

_SHAPE_COLUMNS = ("arch", "ranks", "sms", "tokens", "hidden", "topk", "experts", "dtype", "skew")


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if not value else f"{value:.{digits}f}"


def _whole(record: Record) -> str:
    whole, digits = record["us"]["whole"], _digits(record)
    median, low, high = (_number(whole[name], digits) for name in ("median", "p10", "p90"))
    return f"{median} ({low}-{high})"


def _digits(record: Record) -> int:
    """Low-latency operations are so short that a digit more counts."""
    return int(record["shape"].get("mode") == "low_latency")


def _kernels(record: Record) -> str:
    kernels = record["us"].get("kernels")
    return _number(sum(kernels.values())) if kernels else "-"


_MEASURED: dict[str, Callable[[Record], str]] = {
    "us": _whole,
    "fastest": lambda r: _number(r["us"].get("fastest", {}).get("median"), 1),
    "floor": lambda r: _number(r["us"].get("floor"), 1),
    "rank 0": lambda r: _number(r["us"]["rank0"]["median"]),
    "in a row": lambda r: _number(r["us"].get("back_to_back"), _digits(r)),
    "kernels": _kernels,
    "host": lambda r: _number(r["us"].get("host", {}).get("median"), 1),
    "GB/s (V1)": lambda r: _number(r["gb_per_s"]["v1"], 1),
    "of ceiling": lambda r: f"{100 * r['of_ceiling']:.0f}%",
    "memcpy": lambda r: _number(r["us"].get("memcpy")),
    "of memcpy": lambda r: f"{r['of_memcpy']:.2f}x" if "of_memcpy" in r else "-",
}

LEGEND = (
    "us: median (10th-90th percentile) of the slowest rank, all ranks started together. "
    "rank 0: median on rank 0, ranks running freely (phases: behind a barrier), as DeepEP's "
    "benchmark reports. "
    "in a row: one of many calls without a pause. kernels: their own time. "
    "fastest: median of the rank that was done first; what low latency counts by. "
    "floor: what the bytes read and written would take at the ceiling. "
    "host: until the call returns. GB/s (V1): received payload of the busiest rank, its own "
    "rows included. of ceiling: bytes read and written against a copy within the device."
)


def columns(records: Sequence[Record]) -> tuple[dict[str, str], list[str], list[list[str]]]:
    """What all records have in common, the headings of the rest, and the rows."""
    good = [record for record in records if "error" not in record]
    cells: dict[str, list[str]] = {"operation": [r["operation"] for r in good]}
    for name in _SHAPE_COLUMNS:
        cells[name] = [str(record["shape"][name]) for record in good]
    cells["variant"] = [record["variant"] for record in good]
    common = {
        name: values[0] for name, values in cells.items() if len(set(values)) == 1 and name != "us"
    }
    common.pop("operation", None)
    for name, text in _MEASURED.items():
        cells[name] = [text(record) for record in good]
        if all(value == "-" for value in cells[name]):
            del cells[name]
    headings = [name for name in cells if name not in common]
    rows = [list(row) for row in zip(*(cells[name] for name in headings), strict=True)]
    return common, headings, rows


def _is_text(values: Sequence[str]) -> bool:
    return not all(value[:1].isdigit() or value == "-" for value in values)


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their headings; numbers to the right."""
    table = [list(headings), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    text = [_is_text(column[1:]) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, text, strict=True)
        ).rstrip()
        for row in table
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as a table of a Markdown document."""
    columns_ = list(zip(*rows, strict=True)) if rows else [()] * len(headings)
    rule = ["---" if _is_text(column) else "---:" for column in columns_]
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, rule, *rows])


def text(result: dict[str, Any]) -> str:
    """The whole result for a terminal."""
    common, headings, rows = columns(result["records"])
    machine = result["machine"]
    lines = [f"{machine['machine']}, {machine['date'][:10]}, deepep {machine['deepep']}"]
    for size, top in result["ceiling_gb_per_s"].items():
        lines.append(f"copy ceiling with {size} ranks: {top:.0f} GB/s read and written")
    lines.append(", ".join(f"{name} {value}" for name, value in common.items()))
    if rows:
        lines += ["", aligned(headings, rows), "", LEGEND]
    failed = {record["error"] for record in result["records"] if "error" in record}
    return "\n".join([*lines, *(f"not measured: {error}" for error in sorted(failed))])
