"""Rules R1 to R4 of codegen/templates/README.md, and the rooms that templates keep out of."""

import re
from collections.abc import Iterator

import pytest
from jinja2 import nodes

from codegen.render import TEMPLATES, environment

ALL = sorted(path.relative_to(TEMPLATES).as_posix() for path in TEMPLATES.rglob("*.j2"))
BANNER = "macros/banner.j2"

MAX_LINES = 120
LINES_PER_DECISION = 8
FREE_DECISIONS = 4  # Small files may decide this much.
MAX_DEPTH = 3

TAG = re.compile(r"{%[-+]?\s*(\w+).*?%}")
DECISIONS = {"if", "elif", "else", "for", "macro", "call", "filter", "with"}
SPLICE = re.compile(r"{{.*?}}")
NAME = re.compile(r"{{ (v|unit|template)(\.[a-z_0-9]+)*( \| lower)? }}")
ARITHMETIC = (
    nodes.Add,
    nodes.Sub,
    nodes.Mul,
    nodes.Div,
    nodes.FloorDiv,
    nodes.Mod,
    nodes.Pow,
    nodes.Neg,
    nodes.Assign,
    nodes.AssignBlock,
)
# What belongs in kernels/device, and what only kernels/device/arch may know.
STATEMENTS = re.compile(r"\basm\b|__ldg|atomic|fence|memory_order|__sync")
ARCH_LITERALS = re.compile(r"\b(sm|compute)_?[0-9]+|__CUDA_ARCH__")


def violations(name: str, text: str) -> Iterator[str]:
    """Yield what a template breaks of the rules that can be seen in its text."""
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        yield f"R4: {len(lines)} lines, at most {MAX_LINES}"
    decisions = sum(tag in DECISIONS for tag in TAG.findall(text))
    if decisions > max(FREE_DECISIONS, len(lines) // LINES_PER_DECISION):
        yield f"R4: {decisions} deciding tags, at most one per {LINES_PER_DECISION} lines"
    for number, line in enumerate(lines, 1):
        if "{%" in line and (line.count("{%") > 1 or not TAG.fullmatch(line.strip())):
            yield f"R2: line {number}: a tag must stand alone: {line}"
        for splice in SPLICE.finditer(line):
            if not NAME.fullmatch(splice[0]):
                yield f"R3: line {number}: only a property may be spliced: {line}"
            if name != BANNER and not has_place(line, splice):
                yield f"R1: line {number}: a splice outside constexpr and strings: {line}"
        if STATEMENTS.search(line):
            yield f"room: line {number}: belongs in kernels/device: {line}"
        if ARCH_LITERALS.search(line) and not name.startswith("arch/"):
            yield f"room: line {number}: belongs in codegen/arch.py: {line}"
    for node in environment(TEMPLATES).parse(text).find_all(ARITHMETIC):
        yield f"R3: line {node.lineno}: arithmetic or set; make it a property of Variant"


def has_place(line: str, splice: re.Match[str]) -> bool:
    """Whether a splice is the right side of a constexpr, or in a string literal or #include."""
    before, after = line[: splice.start()], line[splice.end() :]
    if re.fullmatch(r"\s*(inline |static )?constexpr [^=]+ = ", before):
        return after.startswith(";")
    return before.count('"') % 2 == 1 and '"' in after


def depth(name: str) -> int:
    """Length of a template's chain of `extends`, itself included."""
    tree = environment(TEMPLATES).parse((TEMPLATES / name).read_text())
    parents = [node.template.as_const() for node in tree.find_all(nodes.Extends)]
    return 1 + max((depth(parent) for parent in parents), default=0)


@pytest.mark.parametrize("name", ALL)
def test_templates_keep_the_rules(name: str) -> None:
    assert list(violations(name, (TEMPLATES / name).read_text())) == []


@pytest.mark.parametrize("name", ALL)
def test_inheritance_is_shallow(name: str) -> None:
    assert depth(name) <= MAX_DEPTH


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("R1", "for (int i = 0; i < {{ v.num_ranks }}; ++i) {"),
        ("R1", "#define HIDDEN {{ v.hidden }}"),
        ("R1", "constexpr int k{{ v.name }} = 1;"),
        ("R1", "constexpr int kTwice = {{ v.hidden }} * 2;"),
        ("R1", "// A comment about {{ v.name }}."),
        ("R2", "int a{% if v.is_fp8 %}, float* scales{% endif %};"),
        ("R2", "{% if v.is_fp8 %}{% endif %}"),
        ("R3", "constexpr int kTwice = {{ v.hidden * 2 }};"),
        ("R3", 'constexpr char kX[] = "{{ v.name if v.is_fp8 else v.dtype }}";'),
        ("R3", "{% set x = 1 %}"),
        ("R3", "{% if v.hidden % 128 == 0 %}\n{% endif %}"),
        ("R4", "int x;\n" * 121),
        ("R4", "{% if v.is_fp8 %}\n{% endif %}\n" * 5),
        ("room", "__threadfence_system();"),
        ("room", 'asm volatile("");'),
        ("room", "#if __CUDA_ARCH__ >= 900"),
        ("room", "// Only on sm_90."),
    ],
)
def test_a_violation_is_seen(rule: str, text: str) -> None:
    assert [v for v in violations("intranode/x.cu.j2", text) if v.startswith(rule)]


@pytest.mark.parametrize(
    "text",
    [
        "constexpr int kHidden = {{ v.hidden }};  // Elements.",
        "constexpr bool kTma = {{ v.arch_facts.has_tma | lower }};",
        'constexpr char kVariant[] = "{{ v.name }}";',
        '#include "{{ v.arch_header }}"',
        "  {% if v.is_fp8 %}\n  f(scales);\n  {% endif %}",
    ],
)
def test_what_the_rules_allow_passes(text: str) -> None:
    assert list(violations("intranode/x.cu.j2", text)) == []


def test_every_template_is_seen() -> None:
    assert BANNER in ALL and "base/unit.cu.j2" in ALL
