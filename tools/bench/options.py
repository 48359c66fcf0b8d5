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

flags.DEFINE_enum(
    "device", "auto", ["auto", "cpu", "cuda"], "auto: a GPU if there is one with a kernel library"
)
flags.DEFINE_list("arch", [], "architectures: sm90, sm80; empty: the best one for the device")
flags.DEFINE_list("ranks", [str(_DEFAULT.ranks)], "numbers of ranks, each a process")
flags.DEFINE_list("sms", [str(_DEFAULT.sms)], "SMs that each rank may use; no effect on cpu")
flags.DEFINE_list("tokens", [str(_DEFAULT.tokens)], "tokens of each rank")
flags.DEFINE_list("hidden", [str(_DEFAULT.hidden)], "elements of a token")
flags.DEFINE_list("topk", [str(_DEFAULT.topk)], "experts that a token chooses")
flags.DEFINE_list("experts", [str(_DEFAULT.experts)], "experts of all ranks together")
flags.DEFINE_list("dtype", list(shapes.DTYPES), "payloads of dispatch: bf16, fp8")
flags.DEFINE_list("skew", ["uniform"], "routings: uniform, zipf, hot (one rank)")
flags.DEFINE_list(
    "variants", list(shapes.VARIANTS), "best: what the registry chooses; generic: any shape"
)
flags.DEFINE_list(
    "operations", [], f"what to measure; empty: all of {', '.join(shapes.OPERATIONS)}"
)
flags.DEFINE_integer("iterations", 30, "times that each call is measured", lower_bound=1)
flags.DEFINE_integer("warmup", 5, "calls before that", lower_bound=1)
flags.DEFINE_integer("seed", 0, "of routing and rows")
flags.DEFINE_bool("kernels", True, "on a GPU: the kernels' own times too, by torch.profiler")
flags.DEFINE_float("timeout", 600, "seconds for all shapes of one number of ranks")
flags.DEFINE_bool("progress", True, "show a progress bar")
flags.DEFINE_string("machine", "", "name of the machine in the results; empty: its GPU or CPU")
flags.DEFINE_string("out", None, "JSON file to write")
flags.DEFINE_string("plot", None, "picture to write; needs matplotlib")


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


def sweep(values: Any, device: str) -> list[Shape]:
    """The shapes that the flags ask for, those with equal numbers of ranks together."""
    numbers = ("ranks", "sms", "tokens", "hidden", "topk", "experts")
    axes: dict[str, Sequence[Any]] = {name: integers(name, values[name].value) for name in numbers}
    axes["arch"] = choose_archs(values["arch"].value, device)
    axes["skew"] = values["skew"].value
    axes["dtype"] = values["dtype"].value
    axes["variant"] = values["variants"].value
    for name, chosen in axes.items():
        if not chosen:
            raise ValueError(f"--{name} is empty; name at least one value.")
    return shapes.sweep(_DEFAULT, axes)


def settings(values: Any, device: str) -> Options:
    """What is the same for all shapes. Raises ValueError for an operation that does not exist."""
    operations = tuple(values["operations"].value)
    for name in operations:
        if name not in shapes.OPERATIONS:
            raise ValueError(
                f"--operations={name}: must be some of {', '.join(shapes.OPERATIONS)}."
            )
    return Options(
        device=device,
        operations=operations,
        iterations=values["iterations"].value,
        warmup=values["warmup"].value,
        seed=values["seed"].value,
        progress=values["progress"].value,
    )
