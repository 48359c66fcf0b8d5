"""What the user reads after a run, made from what the ranks report."""

from __future__ import annotations

from collections.abc import Sequence

from deepep.quickstart.results import LARGEST_ALLOWED, RMS_ALLOWED, Result, final_loss
from deepep.quickstart.settings import Settings
from deepep.quickstart.tables import bars, span, table

_WIDE = 8
"""Most ranks that get a column each; with more, tables show lowest, mean and highest."""

_PHASES = (
    "embeddings",
    "router",
    "layout",
    "dispatch",
    "permutation",
    "experts",
    "combine",
    "output and loss",
    "gradient of combine",
    "gradient of dispatch",
    "backward",
    "all-reduce of gradients",
    "optimizer",
)
_LABELS = {
    "permutation": "rows to the order of experts, and back",
    "gradient of combine": "gradient of combine (a dispatch)",
    "gradient of dispatch": "gradient of dispatch (a combine)",
    "backward": "all other gradients",
}


def render(settings: Settings, results: Sequence[Result]) -> str:
    """The whole report."""
    sections = (
        _libraries(results),
        _losses(settings, results[0].losses),
        _traffic(settings, results),
        _load(settings, results),
        _times(results),
        _comparison(results[0]),
    )
    return "\n\n".join(sections)


def _libraries(results: Sequence[Result]) -> str:
    chosen = list(dict.fromkeys(line for result in results for line in result.variants))
    return "\n".join(["Kernel libraries chosen", *(f"  {line}" for line in chosen)])


def _losses(settings: Settings, losses: Sequence[float]) -> str:
    count = min(8, len(losses))
    shown = [round(i * (len(losses) - 1) / (count - 1)) for i in range(count)]
    header = ["step", *(str(step + 1) for step in shown)]
    return "Loss, mean over all ranks (nats per byte)\n" + table(
        header, [["loss", *(f"{losses[step]:.2f}" for step in shown)]]
    )


def _traffic(settings: Settings, results: Sequence[Result]) -> str:
    row_bytes = 2 * settings.hidden
    title = f"Rows that dispatch moved in the last step, {row_bytes} bytes each"
    sent = [result.rows_sent for result in results]
    received = [sum(column) for column in zip(*sent, strict=True)]
    narrow = len(results) <= _WIDE
    peers = [f"to {rank}" for rank in range(len(results))] if narrow else []
    header = ["rank", *peers, "rows sent", "received", "KiB sent", "received"]
    rows = [
        [
            str(rank),
            *(str(count) for count in row if narrow),
            str(sum(row)),
            str(received[rank]),
            f"{sum(row) * row_bytes / 1024:.0f}",
            f"{received[rank] * row_bytes / 1024:.0f}",
        ]
        for rank, row in enumerate(sent)
    ]
    return f"{title}\n{table(header, rows)}\n  combine returns as many; backward moves both again"


def _load(settings: Settings, results: Sequence[Result]) -> str:
    loads = [result.expert_load for result in results]
    mean = settings.ranks * settings.tokens * settings.topk / settings.experts
    highest = max(max(load) for load in loads)
    rows = [
        [
            str(rank),
            span(settings.local_experts(rank)),
            str(sum(load)),
            str(min(load)),
            f"{sum(load) / len(load):.1f}",
            str(max(load)),
            bars(load, highest),
        ]
        for rank, load in enumerate(loads)
    ]
    return (
        "Load of the experts in the last step (rows)\n"
        + table(
            ["rank", "experts", "all", "lowest", "mean", "highest", "each"], rows, left=(0, 1, 6)
        )
        + f"\n  highest {highest}, {highest / mean:.2f} times the mean of {mean:.1f}"
    )


def _times(results: Sequence[Result]) -> str:
    phases = [phase for phase in _PHASES if any(phase in result.seconds for result in results)]
    columns = [[result.seconds.get(phase, 0.0) for phase in phases] for result in results]
    if len(results) <= _WIDE:
        header = ["phase", *(f"rank {rank}" for rank in range(len(results)))]
    else:
        header = ["phase", "lowest", "mean", "highest"]
        by_phase = list(zip(*columns, strict=True))
        columns = [
            [min(values) for values in by_phase],
            [sum(values) / len(values) for values in by_phase],
            [max(values) for values in by_phase],
        ]
    rows = [
        [_LABELS.get(phase, phase), *(f"{1000 * column[i]:.1f}" for column in columns)]
        for i, phase in enumerate(phases)
    ]
    rows.append(["whole step", *(f"{1000 * sum(column):.1f}" for column in columns)])
    return (
        "Time of a step in milliseconds\n"
        + table(header, rows)
        + "\n  mean over all steps but the first; waits for slower ranks are included"
    )


def _comparison(result: Result) -> str:
    rows = [
        [
            before.name,
            str(before.elements),
            *(f"{x:.1e}" for x in (before.largest, before.rms, after.largest, after.rms)),
            "ok" if before.ok and after.ok else "WRONG",
        ]
        for before, after in zip(result.before, result.after, strict=True)
    ]
    header = ["tensor", "elements", "before: largest", "rms", "after: largest", "rms", ""]
    return (
        "Difference from the same layer in one process, without dispatch and combine\n"
        + table(header, rows)
        + "\n  relative to the largest element, and to the root mean square, of the tensor;"
        + f"\n  allowed are {LARGEST_ALLOWED:.1e}, a step of BF16, and about {RMS_ALLOWED:.1e}:"
        + "\n  both round to BF16 at the same places, and add some FP32 numbers in another order"
    )


def summary(results: Sequence[Result], seconds: float) -> str:
    """The last line of a run without failures."""
    largest = max((*results[0].before, *results[0].after), key=lambda item: item.largest)
    losses = results[0].losses
    return (
        f"PASSED in {seconds:.0f} s: largest difference {largest.largest:.1e} ({largest.name}), "
        f"loss {losses[0]:.2f} -> {final_loss(losses):.2f}."
    )
