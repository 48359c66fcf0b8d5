"""The flags of the bench, and the sweep that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from absl import flags
from deepep import registry

from tools.bench import shapes
from tools.bench.shapes import Shape
from tools.bench.worker import Options

_DEFAULT = Shape()

_LOW_LATENCY = {
    "tokens": [str(1 << power) for power in range(9)],
    "experts": ["128"],
    "dtype": ["fp8"],
    "variants": ["best"],
}
"""Defaults of --mode=low_latency, where they differ."""


def define(values: Any = flags.FLAGS) -> None:
    """Adds the flags; in a function, so that importing this module adds none."""
    numbers = {
        "ranks": "numbers of ranks, each a process",
        "sms": "SMs that each rank may use; no effect on cpu",
        "tokens": "tokens of each rank",
        "hidden": "elements of a token",
        "topk": "experts that a token chooses",
        "experts": "experts of all ranks together",
    }
    for name, meaning in numbers.items():
        flags.DEFINE_list(name, [str(getattr(_DEFAULT, name))], meaning, flag_values=values)
    words = {
        "arch": ([], "architectures: sm90, sm80; empty: the best one for the device"),
        "dtype": (shapes.DTYPES, "payloads of dispatch: bf16, fp8"),
        "skew": (["uniform"], "routings: uniform, zipf, hot (one rank)"),
        "variants": (shapes.VARIANTS, "best: what the registry chooses; generic: any shape"),
        "operations": ([], f"what to measure; empty: all of {', '.join(shapes.OPERATIONS)}"),
    }
    other = ", ".join(f"{name} {','.join(words)}" for name, words in _LOW_LATENCY.items())
    mode = f"low_latency measures {', '.join(shapes.LOW_LATENCY)}; its defaults: {other}"
    flags.DEFINE_enum("mode", "normal", list(shapes.MODES), mode, flag_values=values)
    for name, (default, meaning) in words.items():
        flags.DEFINE_list(name, list(default), meaning, flag_values=values)
    counts = {
        "iterations": (30, 1, "times that each call is measured"),
        "warmup": (5, 1, "calls before that"),
        "seed": (0, 0, "of routing and rows"),
        "timeout": (600, 1, "seconds for all shapes of one number of ranks"),
    }
    for name, (number, least, meaning) in counts.items():
        flags.DEFINE_integer(name, number, meaning, lower_bound=least, flag_values=values)
    texts = {
        "machine": ("", "name of the machine in the results; empty: its GPU or CPU"),
        "out": (None, "JSON file to write"),
        "plot": (None, "picture to write; needs matplotlib"),
    }
    for name, (text, meaning) in texts.items():
        flags.DEFINE_string(name, text, meaning, flag_values=values)
    kernels = "on a GPU: the kernels' own times too, by torch.profiler"
    flags.DEFINE_bool("kernels", True, kernels, flag_values=values)
    flags.DEFINE_bool("progress", True, "show a progress bar", flag_values=values)
    device = "auto: a GPU if there is one with a kernel library"
    flags.DEFINE_enum("device", "auto", ["auto", "cpu", "cuda"], device, flag_values=values)


_NOT_REPEATED = ("machine", "out", "plot", "progress", "timeout")


def command(values: Any) -> str:
    """The command that measures the same again: every flag that was given and changes a number."""
    own = values.flags_by_module_dict()[__name__]
    given = [flag for flag in own if flag.present and flag.name not in _NOT_REPEATED]
    return " ".join(["python -m tools.bench", *(flag.serialize() for flag in given)])


def integers(name: str, values: Sequence[str]) -> list[int]:
    """The numbers of a list flag. Raises ValueError that names the flag."""
    try:
        return [int(value) for value in values]
    except ValueError:
        raise ValueError(
            f"--{name}={','.join(values)}: must be whole numbers with commas between, such as "
            f"--{name}={getattr(_DEFAULT, name)}."
        ) from None


def choose_device(wanted: str) -> str:
    """cpu or cuda. Raises ValueError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ValueError(
            "--device=cuda: torch.cuda.is_available() is False. Run on a machine with a GPU and a "
            "CUDA build of torch, or pass --device=cpu."
        )
    if wanted != "auto":
        return wanted
    built = {entry.arch for entry in registry.variants()}
    return "cuda" if available and built & {"sm80", "sm90"} else "cpu"


def choose_archs(wanted: Sequence[str], device: str) -> list[str]:
    """The architectures to measure. Raises ValueError for one that the device does not run."""
    allowed = ["host"]
    if device == "cuda":
        hopper = torch.cuda.get_device_capability(0) >= (9, 0)
        allowed = ["sm90", "sm80"] if hopper else ["sm80"]
    if wrong := [arch for arch in wanted if arch not in allowed]:
        raise ValueError(f"--arch={','.join(wrong)}: this {device} runs {', '.join(allowed)}.")
    return list(wanted) or allowed[:1]


def _list(values: Any, name: str) -> list[str]:
    """What a list flag says, or the mode's default."""
    own = values["mode"].value == "low_latency" and not values[name].present
    words: list[str] = _LOW_LATENCY.get(name, values[name].value) if own else values[name].value
    return words


def sweep(values: Any, device: str) -> list[Shape]:
    """The shapes that the flags ask for, those with equal numbers of ranks together."""
    numbers = ("ranks", "sms", "tokens", "hidden", "topk", "experts")
    axes: dict[str, Sequence[Any]] = {name: integers(name, _list(values, name)) for name in numbers}
    axes["arch"] = choose_archs(values["arch"].value, device)
    axes["skew"] = values["skew"].value
    axes["dtype"] = _list(values, "dtype")
    axes["variant"] = _list(values, "variants")
    axes["mode"] = [values["mode"].value]
    for name, chosen in axes.items():
        if not chosen:
            raise ValueError(f"--{name} is empty; name at least one value.")
    return shapes.sweep(_DEFAULT, axes)


def settings(values: Any, device: str) -> Options:
    """What is the same for all shapes. Raises ValueError for an operation that does not exist."""
    operations = tuple(values["operations"].value)
    known = shapes.MODES[values["mode"].value]
    for name in operations:
        if name not in known:
            raise ValueError(f"--operations={name}: must be some of {', '.join(known)}.")
    return Options(
        device=device,
        operations=operations,
        iterations=values["iterations"].value,
        warmup=values["warmup"].value,
        seed=values["seed"].value,
        progress=values["progress"].value,
    )
