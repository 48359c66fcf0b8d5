"""Trains a small MoE model, sharded over several processes, and checks it against one process.

Prints what was sent, the load of the experts, where the time went and the largest difference. Exits
with 1 if the comparison fails or the loss does not fall, with 2 for a flag that breaks a rule.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from deepep.quickstart.launch import run
from deepep.quickstart.settings import Settings

_DEFAULTS = Settings()
flags.DEFINE_integer("ranks", _DEFAULTS.ranks, "Processes that the layer is spread over.")
flags.DEFINE_integer("steps", _DEFAULTS.steps, "Training steps.")
flags.DEFINE_integer("tokens", _DEFAULTS.tokens, "Tokens of each rank in each step.")
flags.DEFINE_integer("hidden", _DEFAULTS.hidden, "Hidden size; rows travel in BF16.")
flags.DEFINE_integer("experts", _DEFAULTS.experts, "Experts of all ranks together.")
flags.DEFINE_integer("topk", _DEFAULTS.topk, "Experts that each token chooses.")
flags.DEFINE_integer("seed", _DEFAULTS.seed, "Of parameters and batches.")
flags.DEFINE_float("learning_rate", _DEFAULTS.learning_rate, "Of Adam.")
flags.DEFINE_float("timeout", _DEFAULTS.timeout, "Seconds to wait for a late rank.")
flags.DEFINE_string(
    "text", _DEFAULTS.text, "File to learn, read as bytes. Without it: the one in the package."
)


def main(argv: Sequence[str]) -> None:
    values: dict[str, Any] = {
        field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(Settings)
    }
    settings = Settings(**values)
    try:
        if len(argv) > 1:
            raise ValueError(f"{argv[1]!r} is no flag; flags are written --name=value, see --help.")
        settings.check()
    except ValueError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run(settings))


if __name__ == "__main__":  # Not in the ranks' processes: they import this file again.
    app.run(main)
