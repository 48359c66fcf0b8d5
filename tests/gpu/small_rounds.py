"""Small rounds of every kind, for compute-sanitizer:

    PYTHONPATH=DIR:. compute-sanitizer --tool memcheck python -m tests.gpu.small_rounds --arch sm90

DIR is what //tools:pack wrote. Ranks are processes, and CUDA MPS must not be running: a sanitizer
does not work with it, and lets the kernels of one process run one after the other only, while those
of several ranks wait for each other. Without a sanitizer, --ranks_as=threads makes them threads of
one process, each with a stream of its own. Everything is compared with the definition, as in the
other tests; the last line counts what was done.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

os.environ["DEEPEP_TEST_DEVICE"] = "cuda"  # read when tests.distributed is imported
# Kernels of one rank wait for those of another, in one process: nothing may be loaded behind a
# running kernel, and no two streams may share a queue of the device.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
from absl import app, flags
from deepep import Buffer
from deepep.groups import wrap
from deepep.testing import run_processes, run_ranks

from tests.distributed import checks
from tests.distributed import low_latency_cases as decoding
from tests.distributed.cases import find
from tests.distributed.checks import expect

CASES = ("plain", "holes", "fp8_column_scales", "fixed_size")
STEP = decoding.Shape(tokens=5, max_tokens=8, hidden=272, topk=3, experts=6)
WAYS = {
    "direct": STEP.but(rows="exported"),
    "sent": STEP.but(rows="foreign"),
    "hook": STEP.but(rows="foreign", hook=True),
    "bf16": STEP.but(rows="exported", cast="bf16"),
    "logfmt": STEP.but(rows="foreign", logfmt=True),
}
"""Low-latency rounds: how rows go out and come back."""


def rounds(group: Any, arch: Any, timeout: float) -> int:
    """One rank's part; returns the number of rounds."""
    size = Buffer.get_low_latency_rdma_size_hint(
        STEP.max_tokens, STEP.hidden, group.size(), STEP.experts
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        with Buffer(group, device="cuda", arch=arch, timeout=timeout) as buffer:
            for name in CASES:
                checks.round_trip(buffer, expect(find(name, group.size())))
            wrap(group, None).barrier()
        with Buffer(
            group,
            num_rdma_bytes=size,
            low_latency_mode=True,
            device="cuda",
            arch=arch,
            timeout=timeout,
        ) as buffer:
            for seed, shape in enumerate(WAYS.values()):
                decoding.check_round(buffer, shape, seed)
            wrap(group, None).barrier()
    return len(CASES) + len(WAYS)


def main(argv: Sequence[str]) -> None:
    values: Any = flags.FLAGS
    kind = values["ranks_as"].value
    run = run_ranks if kind == "threads" else run_processes
    for arch in values["arch"].value:
        count = values["ranks"].value
        done = run(count, rounds, arch, values["timeout"].value, timeout=600)
        print(f"{arch}, {count} ranks as {kind}: {sum(done)} rounds passed, 0 failed")


if __name__ == "__main__":
    flags.DEFINE_list("arch", ["sm90", "sm80"], "architectures of the kernels")
    flags.DEFINE_integer("ranks", 2, "number of ranks", lower_bound=1)
    flags.DEFINE_enum("ranks_as", "processes", ["processes", "threads"], "what a rank is")
    flags.DEFINE_float("timeout", 100, "seconds that a wait may last; sanitizers are slow")
    app.run(main)
