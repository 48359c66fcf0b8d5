"""Renderings are what reviewers have seen: a template's change shows up as a change of text.

The variants differ in every choice that templates make so far: exact or generic, bf16 or fp8, and
which operations a library has.
"""

from pathlib import Path

import pytest

from codegen.render import output_path, render
from codegen.variant import Variant

GOLDEN = Path(__file__).parent / "golden"
VARIANTS = (
    "intranode_host_h512_bf16_r4",
    "intranode_host_hany_fp8_rany",
    "lowlatency_host_hany_fp8_rany",
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


def test_every_golden_variant_is_tested() -> None:
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(VARIANTS)
