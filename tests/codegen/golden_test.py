"""Renderings are what reviewers have seen: a template's change shows up as a change of text.

Between them the variants of a topology take both ways of every `if` in its templates, and are exact
and generic. The GPU's renderings differ from the host's in the names of files only.
"""

import re
from pathlib import Path

import jinja2
import pytest

from codegen.render import TEMPLATES, output_path, render
from codegen.variant import Variant

GOLDEN = Path(__file__).parent / "golden"
VARIANTS = (
    "intranode_host_h512_bf16_r4",
    "intranode_host_hany_fp8_rany",
    "lowlatency_host_hany_fp8_rany",
    "lowlatency_sm90_h7168_bf16_r8",
    "internode_host_h512_bf16_r2x2",
    "internode_host_hany_fp8_rany",
    "internode_sm90_hany_bf16_rany",
)
UPDATE = "python -m tools.update_golden"

CASES = [(name, unit) for name in VARIANTS for unit in Variant.parse(name).units]


@pytest.mark.parametrize(("name", "unit"), CASES)
def test_rendering_is_golden(name: str, unit: str) -> None:
    variant = Variant.parse(name)
    path = GOLDEN / output_path(variant, unit)
    assert path.exists(), f"no golden rendering {path.name} of {name}; run: {UPDATE} {name}"
    assert render(variant, unit) == path.read_text(encoding="utf-8"), (
        f"the rendering of {name} {unit} has changed; if it should have, run: {UPDATE}"
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_else_is_golden(name: str) -> None:
    variant = Variant.parse(name)
    expected = {GOLDEN / output_path(variant, unit) for unit in variant.units}
    assert {path for path in (GOLDEN / name).iterdir()} == expected, f"run: {UPDATE}"


@pytest.mark.parametrize(("name", "unit"), CASES)
def test_the_first_comment_says_what_and_how(name: str, unit: str) -> None:
    first, template, command, *_ = render(Variant.parse(name), unit).splitlines()
    assert first == f"// {name}: {unit}. Generated, do not edit."
    assert template.startswith("// Template: codegen/templates/") and template.endswith(".cu.j2")
    assert command == f"// Regenerate: python -m codegen render {name} {unit}"


CONDITIONS = {
    (folder.name, condition)
    for folder in TEMPLATES.iterdir()
    for template in folder.glob("*.cu.j2")
    for condition in re.findall(r"{%-? *(?:el)?if (.*?) *-?%}", template.read_text())
}


@pytest.mark.parametrize(("topology", "condition"), sorted(CONDITIONS))
def test_both_ways_of_every_if_are_golden(topology: str, condition: str) -> None:
    holds = jinja2.Environment().compile_expression(condition)
    variants = [v for v in map(Variant.parse, VARIANTS) if topology in (v.topology, "base")]
    assert {bool(holds(v=v, unit=unit)) for v in variants for unit in v.units} == {True, False}


@pytest.mark.parametrize("topology", ["intranode", "lowlatency"])
def test_exact_and_generic_are_golden(topology: str) -> None:
    variants = [v for v in map(Variant.parse, VARIANTS) if v.topology == topology]
    assert {bool(v.hidden) for v in variants} == {bool(v.num_ranks) for v in variants}
    assert {bool(v.hidden) for v in variants} == {True, False}


def test_every_golden_variant_is_tested() -> None:
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(VARIANTS)
