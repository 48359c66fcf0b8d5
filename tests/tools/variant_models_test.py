"""Models are read from the config.json of each family as it is published."""

import json
from pathlib import Path
from typing import Any

import pytest

from codegen.errors import CodegenError
from codegen.table import read_table
from tools import variant_models
from tools.variant_models import KNOWN, find, read_config

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
DEEPSEEK = {"hidden_size": 7168, "n_routed_experts": 256, "num_experts_per_tok": 8}
CONFIGS: list[tuple[dict[str, Any], tuple[int, int, int, str]]] = [
    ({**DEEPSEEK, "quantization_config": FP8}, (7168, 256, 8, "fp8")),
    ({**DEEPSEEK, "quantization_config": "fp8"}, (7168, 256, 8, "fp8")),
    ({**DEEPSEEK, "quantization_config": ["int4"]}, (7168, 256, 8, "bf16")),
    (
        {
            **DEEPSEEK,
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
            },
        },
        (7168, 256, 8, "fp8"),
    ),
    ({**DEEPSEEK, "torch_dtype": "bfloat16"}, (7168, 256, 8, "bf16")),
    ({"hidden_size": 4096, "num_local_experts": 8, "num_experts_per_tok": 2}, (4096, 8, 2, "bf16")),
    ({"hidden_size": 2048, "num_experts": 128, "num_experts_per_tok": 8}, (2048, 128, 8, "bf16")),
    (
        {
            "hidden_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "quantization_config": {"quant_method": "mxfp4"},
        },
        (2880, 32, 4, "bf16"),
    ),
    (
        {"hidden_size": 2560, "moe_num_experts": 64, "moe_k": 6, "dtype": "bfloat16"},
        (2560, 64, 6, "bf16"),
    ),
    (
        {"d_model": 6144, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}},
        (6144, 16, 4, "bf16"),
    ),
    (
        {"model_type": "vision", "text_config": {**DEEPSEEK, "quantization_config": FP8}},
        (7168, 256, 8, "fp8"),
    ),
    (
        {**DEEPSEEK, "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
        (7168, 256, 8, "fp8"),
    ),
]


def written(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("config", "numbers"), CONFIGS)
def test_published_spellings_are_read(
    tmp_path: Path, config: dict[str, Any], numbers: tuple[int, int, int, str]
) -> None:
    model = read_config(written(tmp_path, config))
    assert (model.hidden, model.experts, model.topk, model.dtype) == numbers


def test_a_model_is_found_by_name_file_or_folder(tmp_path: Path) -> None:
    assert find("DeepSeek-V3", tmp_path) is KNOWN["deepseek-v3"]
    assert find("deepseek-ai/DeepSeek-V3", tmp_path) is KNOWN["deepseek-v3"]
    written(tmp_path, CONFIGS[0][0])
    assert find("config.json", tmp_path) == find(".", tmp_path)
    with pytest.raises(CodegenError, match="did you mean kimi-k2"):
        find("kimi-k3", tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([], "no JSON object"),
        ({"hidden_size": 4096}, "no number of experts, looked for as n_routed_experts"),
        ({"num_experts": 8, "num_experts_per_tok": 2}, "no hidden size"),
        ({"hidden_size": 4096, "num_experts": 8}, "no experts per token"),
        ({"hidden_size": True, "num_experts": 8}, "no hidden size"),
        ({"hidden_size": "4096", "num_experts": 8}, "no hidden size"),
    ],
)
def test_what_a_config_lacks_is_said(tmp_path: Path, config: object, words: str) -> None:
    with pytest.raises(CodegenError, match=words):
        read_config(written(tmp_path, config))


def test_broken_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CodegenError, match="cannot be read"):
        read_config(tmp_path / "config.json")


def test_the_catalog_serves_every_known_model() -> None:
    built = {(v.hidden, v.dtype) for v in read_table() if v.arch == "sm90" and v.num_ranks == 8}
    assert {(model.hidden, model.dtype) for model in variant_models.KNOWN.values()} <= built
