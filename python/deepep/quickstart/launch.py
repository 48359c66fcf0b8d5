"""Starts the ranks, shows what they report and says whether all is well."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from deepep.errors import DeepEPError
from deepep.quickstart import report
from deepep.quickstart.results import Result, failures
from deepep.quickstart.settings import Settings
from deepep.quickstart.tables import spans
from deepep.testing import run_processes
from deepep.version import __version__

_TIME_LIMIT = 24 * 3600.0
"""Seconds for a whole run. Late ranks end it by Settings.timeout, dead ones at once."""


def work(group: Any, settings: Settings) -> Result:
    """Body of a rank's process."""
    from deepep.quickstart import train  # imports torch, which the starting process needs not

    return train.work(group, settings)


def run(settings: Settings, body: Callable[[Any, Settings], Result] = work) -> int:
    """Runs everything and prints it; returns the exit status.

    Args:
        settings: checked.
        body: what each rank does.

    Raises:
        as deepep.testing.run_processes, but for errors that this package words.
    """
    start = time.monotonic()
    print(_introduction(settings), flush=True)
    try:
        results = run_processes(settings.ranks, body, settings, timeout=_TIME_LIMIT)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except Exception as error:
        # These say all there is to say; anything else is a defect and keeps its traceback.
        told = error if isinstance(error, DeepEPError) else error.__cause__
        if not isinstance(told, DeepEPError):
            raise
        print(f"FAILED: {type(told).__name__}: {told}", file=sys.stderr)
        return 1
    print("\n" + report.render(settings, results) + "\n")
    wrong = failures(results)
    for failure in wrong:
        print(f"FAILED: {failure}", file=sys.stderr)
    if not wrong:
        print(report.summary(results, time.monotonic() - start))
    return 1 if wrong else 0


def _introduction(settings: Settings) -> str:
    owned = [settings.local_experts(rank) for rank in range(settings.ranks)]
    lines = (
        f"deepep {__version__} quickstart: a sharded MoE layer learns to predict the next byte",
        "",
        f"  layer    {settings.experts} experts, top-{settings.topk}, hidden {settings.hidden}",
        f"  ranks    {settings.ranks} processes on the CPU with experts {spans(owned)}",
        f"  batch    {settings.tokens} tokens on each rank, {settings.steps} steps",
        f"  text     {settings.text_path.name}, {settings.text_path.stat().st_size} bytes",
        "",
        "starting ranks, comparing with one process, training ...",
    )
    return "\n".join(lines)
