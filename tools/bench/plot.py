"""A result as a picture: one panel for each operation. matplotlib is needed only here."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

AXES = ("tokens", "hidden", "sms", "ranks", "topk", "experts", "skew")


class PlotError(RuntimeError):
    """There is nothing to draw with, or nothing to draw."""


def x_axis(records: Sequence[Record]) -> str:
    """The field of the shape that takes most values; the first of AXES where all take one."""
    counts = {name: len({record["shape"][name] for record in records}) for name in AXES}
    return max(AXES, key=lambda name: counts[name])


def series(records: Sequence[Record], axis: str) -> dict[str, dict[str, list[tuple[Any, float]]]]:
    """operation -> label of a line -> (place on the axis, microseconds).

    Low-latency records have a line for the fastest rank, and one for the floor.
    """
    varying = [
        name
        for name in (*AXES, "arch", "dtype", "variant")
        if name != axis and len({record["shape"][name] for record in records}) > 1
    ]
    found: dict[str, dict[str, list[tuple[Any, float]]]] = {}
    for record in records:
        label = ", ".join(f"{record['shape'][name]}" for name in varying) or record["variant"]
        lines, us = found.setdefault(record["operation"], {}), record["us"]
        place = record["shape"][axis]
        lines.setdefault(label, []).append((place, us.get("fastest", us["whole"])["median"]))
        if "floor" in us:
            lines.setdefault(f"floor, {label}", []).append((place, us["floor"]))
    for panel in found.values():
        for line in panel.values():
            line.sort(key=lambda point: str(point[0]) if axis == "skew" else point[0])
    return found


def matplotlib() -> Any:
    """matplotlib.pyplot that draws into files. Raises PlotError where it is not installed."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise PlotError(
            f"--plot needs matplotlib, which cannot be imported ({error}). Install it with "
            "pip install matplotlib, or draw elsewhere from the JSON: python -m tools.bench.report "
            "FILE.json --plot FILE.png"
        ) from error


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the picture (PNG, or what the file's suffix says)."""
    pyplot = matplotlib()
    records = [record for record in result["records"] if "error" not in record]
    if not records:
        raise PlotError("--plot: nothing was measured, so there is nothing to draw.")
    axis = x_axis(records)
    panels = series(records, axis)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(4.5 * columns, 3.4 * rows), squeeze=False, layout="constrained"
    )
    flat = [panel for row in grid for panel in row]
    for panel, (operation, lines) in zip(flat, panels.items(), strict=False):
        for label, points in sorted(lines.items()):
            panel.plot([str(x) for x, _ in points], [y for _, y in points], "o-", label=label)
        panel.set_title(operation)
        panel.set_xlabel(axis)
        panel.set_ylabel("microseconds")
        panel.set_ylim(bottom=0)
        panel.legend(fontsize="small")
    for panel in flat[len(panels) :]:
        panel.set_visible(False)
    machine = result["machine"]
    figure.suptitle(f"{machine['machine']}, {machine['date'][:10]}")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
