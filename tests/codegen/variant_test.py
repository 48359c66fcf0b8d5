"""The name grammar reads both ways, and every illegal configuration is refused in words."""

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from codegen.arch import ARCHS
from codegen.errors import CodegenError
from codegen.variant import ELEM_BYTES, MAX_HIDDEN, MAX_NODES, MAX_RANKS, UNITS, Variant

RANKS = st.integers(min_value=1, max_value=MAX_RANKS)


@st.composite
def legal_variants(draw: st.DrawFn) -> Variant:
    """Any legal variant."""
    topology: Any = draw(st.sampled_from(sorted(UNITS)))
    ranks, nodes = draw(RANKS), 1
    if topology == "internode":
        nodes = draw(st.integers(min_value=2, max_value=MAX_NODES))
    if draw(st.booleans()):
        ranks, nodes = 0, 0 if topology == "internode" else 1
    arch: Any = draw(st.sampled_from(sorted(ARCHS)))
    dtype: Any = draw(st.sampled_from(sorted(ELEM_BYTES)))
    return Variant(
        topology=topology,
        arch=arch,
        hidden=16 * draw(st.integers(min_value=0, max_value=MAX_HIDDEN // 16)),
        dtype=dtype,
        num_ranks=ranks,
        num_nodes=nodes,
    )


@hypothesis.given(legal_variants())
def test_parse_is_the_inverse_of_name(variant: Variant) -> None:
    assert Variant.parse(variant.name) == variant


@hypothesis.given(legal_variants())
def test_name_is_an_identifier(variant: Variant) -> None:
    assert variant.name.isidentifier() and variant.name.isascii()


@hypothesis.given(
    st.from_regex(
        r"(intranode|lowlatency|internode)_host_h(any|\d{1,4})_(bf16|fp8)_r(any|\d{1,2})(x\d?)?",
        fullmatch=True,
    )
)
def test_parse_returns_only_what_has_that_name(text: str) -> None:
    with contextlib.suppress(CodegenError):
        assert Variant.parse(text).name == text


@pytest.mark.parametrize(
    "name",
    [
        "intranode_host_hany_bf16_rany",
        "intranode_host_h512_bf16_r4",
        "intranode_sm90_h7168_fp8_r8",
        "lowlatency_sm80_h2880_bf16_rany",
        "internode_sm90_h7168_bf16_r8x4",
        "internode_host_hany_fp8_rany",
    ],
)
def test_documented_names_round_trip(name: str) -> None:
    assert Variant.parse(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "intranode",
        "Intranode_host_h512_bf16_r4",
        "intranode_host_h0512_bf16_r4",
        "intranode_host_h0_bf16_r4",
        "intranode_host_h-16_bf16_r4",
        "intranode_host_h512_bf16_r0",
        "intranode_host_h512_bf16_r04",
        "intranode_host_h512_bf16_r",
        "intranode_host_h512_bf16_r4\n",
        " intranode_host_h512_bf16_r4",
        "intranode_host_h512_bf16_r4_",
        "intranode_host_h\u0665\u0661\u0662_bf16_r4",  # 512 in digits of another script.
        "internode_host_h512_bf16_r4xany",
        "../intranode_host_h512_bf16_r4",
    ],
)
def test_names_outside_the_grammar_are_refused_with_an_example(name: str) -> None:
    with pytest.raises(CodegenError) as refusal:
        Variant.parse(name)
    message = str(refusal.value)
    assert repr(name) in message and "must read" in message
    assert "intranode_sm90_h7168_fp8_r8" in message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("intranod_host_h512_bf16_r4", ["topology", "'intranod'", "did you mean intranode?"]),
        ("intranode_sm75_h512_bf16_r4", ["arch", "'sm75'", "host, sm80, sm90"]),
        ("intranode_host_h512_fp16_r4", ["dtype", "'fp16'", "bf16, fp8"]),
        ("intranode_host_h2097152_bf16_r4", ["hidden", "2097152", "1 to 1048576", "hany"]),
        ("intranode_host_h100_bf16_r4", ["hidden", "200 bytes", "16 bytes", "pad hidden to 104"]),
        ("intranode_host_h104_fp8_r4", ["hidden", "104 bytes", "16 bytes", "pad hidden to 112"]),
        ("intranode_host_h512_bf16_r65", ["ranks", "65", "1 to 64", "internode"]),
        ("internode_host_h512_bf16_r65x2", ["ranks", "65", "1 to 64"]),
        ("intranode_host_h512_bf16_r4x2", ["nodes is 2", "one memory domain", "internode"]),
        ("lowlatency_host_h512_bf16_r4x2", ["nodes is 2", "lowlatency", "without x<nodes>"]),
        ("internode_host_h512_bf16_r4", ["nodes is 1", "2 to 64", "intranode"]),
        ("internode_host_h512_bf16_r4x1", ["nodes is 1", "2 to 64", "intranode"]),
        ("internode_host_h512_bf16_ranyx2", ["ranks a node is 0", "nodes is 2", "rany"]),
        ("internode_host_h512_bf16_r4x65", ["nodes is 65", "2 to 64"]),
    ],
)
def test_illegal_configurations_are_refused_with_value_rule_and_cure(
    name: str, words: list[str]
) -> None:
    with pytest.raises(CodegenError) as refusal:
        Variant.parse(name)
    message = str(refusal.value)
    assert message.startswith(f"variant {name}: ")
    assert not [word for word in words if word not in message], message


def test_one_node_is_written_in_one_way() -> None:
    with pytest.raises(CodegenError, match=r"no x1; write intranode_host_h512_bf16_r4$"):
        Variant.parse("intranode_host_h512_bf16_r4x1")


@pytest.mark.parametrize(
    "change",
    [
        {"topology": "ring"},
        {"arch": "sm70"},
        {"dtype": "fp32"},
        {"hidden": -16},
        {"hidden": 7},
        {"num_ranks": -1},
        {"num_ranks": 65},
        {"num_nodes": 0},
        {"topology": "internode", "num_ranks": 0, "num_nodes": 4},
        {"topology": "internode", "num_ranks": 4, "num_nodes": 0},
        {"topology": "internode", "num_ranks": 4, "num_nodes": -1},
    ],
)
def test_the_constructor_refuses_what_parse_refuses(change: dict[str, Any]) -> None:
    with pytest.raises(CodegenError):
        dataclasses.replace(Variant.parse("intranode_host_h512_bf16_r4"), **change)


def test_a_variant_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Variant.parse("intranode_host_h512_bf16_r4").hidden = 1024  # type: ignore[misc]


def test_derived_numbers() -> None:
    fp8 = Variant.parse("internode_sm90_h7168_fp8_r8x4")
    assert (fp8.elem_bytes, fp8.row_bytes, fp8.is_fp8) == (1, 7168, True)
    assert (fp8.num_ranks, fp8.num_nodes) == (8, 4)
    assert fp8.needs_nvshmem and not fp8.is_host
    bf16 = Variant.parse("intranode_host_h512_bf16_r4")
    assert (bf16.elem_bytes, bf16.row_bytes, bf16.is_fp8) == (2, 1024, False)
    assert (bf16.num_ranks, bf16.num_nodes) == (4, 1)
    assert bf16.is_host and not bf16.needs_nvshmem
    assert (bf16.library, bf16.bazel_target) == (
        "libdeepep_intranode_host_h512_bf16_r4.so",
        "//kernels:intranode_host_h512_bf16_r4",
    )


@pytest.mark.parametrize("topology", ["intranode", "lowlatency", "internode"])
def test_generic_variants_have_zeros(topology: str) -> None:
    variant = Variant.parse(f"{topology}_host_hany_bf16_rany")
    assert (variant.hidden, variant.row_bytes, variant.num_ranks) == (0, 0, 0)


@pytest.mark.parametrize(
    ("topology", "units"),
    [
        ("intranode", ("variant", "notify", "dispatch", "combine")),
        ("lowlatency", ("variant", "dispatch", "combine")),
        ("internode", ("variant", "notify", "dispatch", "combine")),
    ],
)
def test_units(topology: str, units: tuple[str, ...]) -> None:
    assert Variant.parse(f"{topology}_host_hany_bf16_rany").units == units


def test_every_property_says_what_it_means() -> None:
    silent = [n for n, m in vars(Variant).items() if isinstance(m, property) and not m.__doc__]
    assert not silent


def test_the_limit_of_ranks_is_the_header_s() -> None:
    header = Path(__file__).parent.parent.parent / "kernels/abi/deepep_kernel.h"
    limit = re.search(r"#define DEEPEP_MAX_RANKS (\d+)", header.read_text())
    assert limit and int(limit[1]) == MAX_RANKS
