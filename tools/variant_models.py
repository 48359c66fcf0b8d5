"""What a model asks of the kernels: known models, and a Hugging Face config.json.

Used by tools/gen_variants.py. Downloads nothing: a model that is not known is given by its file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen.errors import CodegenError, nearest


@dataclass(frozen=True, slots=True)
class Model:
    """The numbers of a Mixture-of-Experts model that its communication depends on.

    Attributes:
        name: what people call it, or the file that it was read from.
        hidden: elements of one token.
        experts: routed experts of one layer.
        topk: experts that a token chooses.
        dtype: what its expert layers compute in: "fp8" if it is quantised to FP8, else "bf16".
    """

    name: str
    hidden: int
    experts: int
    topk: int
    dtype: str

    def __str__(self) -> str:
        return (
            f"{self.name}: hidden {self.hidden}, {self.experts} experts, top {self.topk}, "
            f"{self.dtype}"
        )


_KNOWN = (
    Model("deepseek-r1", 7168, 256, 8, "fp8"),
    Model("deepseek-v3", 7168, 256, 8, "fp8"),
    Model("glm-4.5", 5120, 160, 8, "bf16"),
    Model("gpt-oss-120b", 2880, 128, 4, "bf16"),
    Model("gpt-oss-20b", 2880, 32, 4, "bf16"),
    Model("kimi-k2", 7168, 384, 8, "fp8"),
    Model("minimax-m2", 3072, 256, 8, "fp8"),
    Model("mixtral-8x7b", 4096, 8, 2, "bf16"),
    Model("qwen3-235b", 4096, 128, 8, "bf16"),
    Model("qwen3-30b", 2048, 128, 8, "bf16"),
)

KNOWN: Mapping[str, Model] = {model.name: model for model in _KNOWN}

# Model families name the same number differently.
_HIDDEN = ("hidden_size", "d_model", "n_embd")
_EXPERTS = (
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_routed_experts",
)
_TOPK = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k")
# Where a config keeps the language model's part, or its expert layers' part.
_PARTS = ("text_config", "language_config", "llm_config", "ffn_config")


def find(name_or_file: str, folder: Path) -> Model:
    """Return a known model, or read a config.json (relative to `folder`), or a folder with one.

    Raises:
        CodegenError: the model is not known, or the file does not say what is needed.
    """
    known = KNOWN.get(name_or_file.lower())
    if known:
        return known
    path = folder / name_or_file
    last = name_or_file.lower().rpartition("/")[2]  # On Hugging Face the owner stands before it.
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return read_config(path)
    if last in KNOWN:
        return KNOWN[last]
    raise CodegenError(
        f"model is {name_or_file!r}, but it is neither a file nor one of {', '.join(KNOWN)}; give "
        f"the path of its config.json, or --hidden and --dtype{nearest(last, KNOWN)}"
    )


def read_config(path: Path) -> Model:
    """Return the model that a Hugging Face config.json describes; raises as find()."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CodegenError(
            f"model's config {path} cannot be read: {error}; give a Hugging Face config.json"
        ) from error
    if not isinstance(config, dict):
        raise CodegenError(f"model's config {path} holds no JSON object; give its config.json")
    parts = [config, *(config[part] for part in _PARTS if isinstance(config.get(part), dict))]
    return Model(
        name=str(config.get("model_type", path)),
        hidden=_number(parts, _HIDDEN, "hidden size", path),
        experts=_number(parts, _EXPERTS, "number of experts", path),
        topk=_number(parts, _TOPK, "experts per token", path),
        dtype="fp8" if any(map(_is_fp8, parts)) else "bf16",
    )


def _number(parts: list[dict[str, Any]], keys: tuple[str, ...], what: str, path: Path) -> int:
    """Return the first of the keys that one of the parts has."""
    for part in parts:
        for key in keys:
            # bool is an int, and no count.
            if type(part.get(key)) is int and part[key] > 0:
                return int(part[key])
    raise CodegenError(
        f"model's config {path} has no {what}, looked for as {', '.join(keys)}; is it a "
        "Mixture-of-Experts model? Give --hidden, --dtype and --ranks instead"
    )


def _is_fp8(part: Mapping[str, Any]) -> bool:
    """Whether weights or activations are quantised to FP8, in any of the formats' spellings."""
    settings = part.get("quantization_config")
    words = [part.get("torch_dtype"), part.get("dtype")]
    if isinstance(settings, dict):
        words += [settings.get(key) for key in ("quant_method", "quant_algo", "fmt", "format")]
    else:
        words.append(settings)
    return any(re.search("fp8|float8|float-quantized", str(word).lower()) for word in words)
