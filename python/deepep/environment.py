"""Every environment variable that deepep reads: its name, kind, default and meaning, in one table.

Other modules ask value(); a Buffer calls check() once, which warns of names that mean nothing.
docs/environment.md shows the table. Knows no torch.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("deepep")
"""Where DEEPEP_DEBUG writes to."""

MAX_SECONDS = 1e9
PREFIX = "DEEPEP_"
ELSEWHERE = (
    *("DEEPEP_PYTHON", "DEEPEP_VARIANTS", "DEEPEP_CUDA_HOME", "DEEPEP_NVSHMEM_HOME"),
    *("DEEPEP_TEST_DEVICE", "DEEPEP_GPU_"),
)
"""Names, and beginnings of names, that the build and the tests read."""


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    if text.lower() not in values:
        raise ValueError("must be 1 or 0")
    return values[text.lower()]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _seconds(text: str) -> float:
    seconds = _number(text)
    if not 0 < seconds <= MAX_SECONDS:  # false for nan
        raise ValueError("must be a number of seconds above 0 and up to 1e9")
    return seconds


def _share(text: str) -> float:
    share = _number(text)
    if not 0 < share <= 1:
        raise ValueError("must be a share above 0 and up to 1")
    return share


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("must be a whole number of at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 48:
        raise ValueError("must be a whole number below 2^48")
    return int(text)


@dataclass(frozen=True, slots=True)
class Switch:
    """One variable. `idle` says why it has nothing to act on, if so."""

    name: str
    kind: str
    default: Any
    meaning: str
    parse: Callable[[str], Any]
    idle: str = ""


SWITCHES = (
    Switch(
        "DEEPEP_TIMEOUT",
        "seconds",
        100.0,
        "how long each wait for a peer may last, where Buffer is given no timeout",
        _seconds,
    ),
    Switch(
        "DEEPEP_PIN",
        "NAME or NAME@SHA256, separated by commas",
        "",
        "the only variants that may be chosen, where deepep.pin was not called",
        str,
    ),
    Switch(
        "DEEPEP_VARIANT_PATH",
        "folders, separated by colons",
        "",
        "where kernel libraries are looked for before the package's own",
        str,
    ),
    Switch(
        "DEEPEP_DEBUG",
        "0 or 1",
        False,
        "log to stderr what is chosen, sizes, waits and the time of every operation",
        _flag,
    ),
    Switch(
        "DEEPEP_SM_UTILIZATION",
        "share, above 0 to 1",
        1.0,
        "of a GPU's multiprocessors (of this rank's share, where ranks share one): the most that "
        "an operation may use, whatever num_sms says; unset, 0.5 where ranks share one, so that a "
        "dispatch and a combine can run at the same time",
        _share,
    ),
    Switch(
        "DEEPEP_NVLINK_OPTIMIZE",
        "0 or 1",
        True,
        "low-latency rows go straight to their place in the peers' tensors and are read where they "
        "lie; 0: they go through workspaces",
        _flag,
    ),
    Switch(
        "DEEPEP_ADAPTIVE_ROUTING",
        "0 or 1",
        False,
        "adaptive routing in the network between nodes: sets NVSHMEM_IB_SL to 1, or to 0, where "
        "nobody has set it; with GPUs only",
        _flag,
    ),
    Switch(
        "DEEPEP_COMM_THREADS",
        "number",
        1,
        "threads that serve the network between nodes",
        _count,
        "GPUs post by themselves, and a rank on the CPU works in its caller's thread",
    ),
    Switch(
        "DEEPEP_NETWORK_SEED",
        "number",
        0,
        "on the CPU: messages between nodes are late and overtake each other, in another way for "
        "each number; 0: they arrive at once",
        _seed,
    ),
    Switch(
        "DEEPEP_ALLOW_NVSHMEM_MISMATCH",
        "0 or 1",
        False,
        "load a kernel library although the installed NVSHMEM is of another version than the one "
        "it was built with",
        _flag,
    ),
    Switch(
        "DEEPEP_NO_MEMPOOL",
        "0 or 1",
        False,
        "work without torch.cuda.MemPool, as with torch 2.4 and older",
        _flag,
    ),
)
_BY_NAME: Mapping[str, Switch] = {switch.name: switch for switch in SWITCHES}
_checked: set[str] = set()


def value(name: str) -> Any:
    """The variable's value, or its default where it is unset or empty.

    Raises:
        ValueError: it does not make sense; the text has the variable, its value and the rule.
    """
    switch = _BY_NAME[name]
    text = os.environ.get(name, "")
    if not text:
        return switch.default
    try:
        return switch.parse(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: {error}. It means: {switch.meaning}.") from None


def is_set(name: str) -> bool:
    """Whether the variable has a value."""
    return bool(os.environ.get(name, ""))


def set_defaults(values: Mapping[str, str]) -> None:
    """Sets variables that libraries beside this one read, where nobody has set them."""
    for name, text in values.items():
        os.environ.setdefault(name, text)


def check() -> None:
    """Checks every variable that is set; warns, once a name, of unknown ones.

    Raises:
        ValueError: as value.
    """
    for name in sorted(os.environ):
        if not name.startswith(PREFIX) or name.startswith(ELSEWHERE):
            continue
        if name in _BY_NAME:
            value(name)
        elif name not in _checked:
            _checked.add(name)
            near = difflib.get_close_matches(name, _BY_NAME, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            warnings.warn(
                f"{name} is set, but deepep has no such variable{meant} The list: "
                "docs/environment.md.",
                RuntimeWarning,
                stacklevel=3,
            )
    if debugging():
        _log_to_stderr()
        for switch in SWITCHES:
            if is_set(switch.name):
                idle = f"; nothing to act on: {switch.idle}" if switch.idle else ""
                log.debug("%s=%s%s", switch.name, os.environ[switch.name], idle)


def default_timeout() -> float:
    """Seconds that a wait may last where nobody says otherwise."""
    return float(value("DEEPEP_TIMEOUT"))


def check_timeout(seconds: float, what: str) -> float:
    """Returns `seconds` if a wait may last that long; raises ValueError if not."""
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{what}: a timeout is a number of seconds above 0 and up to 1e9.")
    return seconds


def log_time(rank: int, what: str, begin_ns: int) -> None:
    """Logs how long something took; of what runs on a GPU that is the launch."""
    log.debug("rank %d: %s %.1f us", rank, what, (time.perf_counter_ns() - begin_ns) / 1e3)


def debugging() -> bool:
    """Whether DEEPEP_DEBUG is on."""
    return bool(value("DEEPEP_DEBUG"))


def _log_to_stderr() -> None:
    """Shows the log, unless the program has said where it goes."""
    log.setLevel(logging.DEBUG)
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s deepep[%(process)d] %(message)s"))
        log.addHandler(handler)


def markdown() -> str:
    """The table of docs/environment.md."""
    lines = ["| Variable | Value | Default | Meaning |", "|---|---|---|---|"]
    for switch in SWITCHES:
        shown: Any = switch.default
        if isinstance(shown, bool):
            shown = int(shown)
        elif isinstance(shown, float) and math.isfinite(shown):
            shown = f"{shown:g}"
        meaning = switch.meaning + (
            f". Has nothing to act on: {switch.idle}" if switch.idle else ""
        )
        lines.append(f"| `{switch.name}` | {switch.kind} | {shown} | {meaning} |")
    return "\n".join(lines) + "\n"
