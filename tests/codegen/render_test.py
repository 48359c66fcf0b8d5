"""Rendering finds the template by its path, and every failure says which line and what to do."""

from pathlib import Path

import jinja2
import pytest

from codegen.errors import CodegenError
from codegen.render import TEMPLATES, environment, output_path, render, template_path
from codegen.table import read_table
from codegen.variant import Variant

HOST = Variant.parse("intranode_host_h512_bf16_r4")
SM90 = Variant.parse("internode_sm90_h7168_fp8_r8x4")


def write(folder: Path, **texts: str) -> Path:
    """Write templates into intranode/ and return their folder."""
    (folder / "intranode").mkdir(exist_ok=True)
    for unit, text in texts.items():
        (folder / "intranode" / f"{unit}.cu.j2").write_text(text)
    return folder


def test_paths_follow_from_variant_and_unit() -> None:
    assert template_path(HOST, "notify") == "intranode/notify.cu.j2"
    assert template_path(SM90, "notify") == "internode/notify.cu.j2"
    assert template_path(SM90, "variant") == "base/variant.cu.j2"
    assert output_path(HOST, "notify") == "intranode_host_h512_bf16_r4/notify.cc"
    assert output_path(SM90, "notify") == "internode_sm90_h7168_fp8_r8x4/notify.cu"


def test_templates_see_the_variant_the_unit_and_their_own_path(tmp_path: Path) -> None:
    write(tmp_path, notify="{{ v.name }} {{ unit }} {{ template }}\n")
    text = render(HOST, "notify", tmp_path)
    assert text == "intranode_host_h512_bf16_r4 notify intranode/notify.cu.j2\n"


def test_tags_leave_no_trace(tmp_path: Path) -> None:
    write(tmp_path, notify='a\n  {% if v.is_host %}\nb && "<c>"\n  {% endif %}\nd\n')
    assert render(HOST, "notify", tmp_path) == 'a\nb && "<c>"\nd\n'


def test_unknown_units_are_refused_with_the_units_there_are() -> None:
    lowlatency = Variant.parse("lowlatency_host_hany_bf16_rany")
    with pytest.raises(CodegenError, match=r"'notify'.*one of variant, dispatch, combine"):
        render(lowlatency, "notify")


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(CodegenError, match=r"'intranode/notify.cu.j2'.*no such file; add it"):
        render(HOST, "notify", tmp_path)


def test_an_unknown_property_is_an_error_with_its_line(tmp_path: Path) -> None:
    write(tmp_path, notify="a\nb\n{{ v.hiden }}\n")
    with pytest.raises(CodegenError, match=r"intranode/notify.cu.j2:3: .*hiden.*; correct"):
        render(HOST, "notify", tmp_path)


def test_a_syntax_error_is_an_error_with_its_line(tmp_path: Path) -> None:
    write(tmp_path, notify="a\n{% if %}\n")
    with pytest.raises(CodegenError, match=r"intranode/notify.cu.j2:2: "):
        render(HOST, "notify", tmp_path)


def test_a_required_block_must_be_filled(tmp_path: Path) -> None:
    write(
        tmp_path,
        root="{% block kernel required %}\n{% endblock %}\n",
        notify='{% extends "intranode/root.cu.j2" %}\n',
    )
    with pytest.raises(CodegenError, match="Required block 'kernel' not found"):
        render(HOST, "notify", tmp_path)


def test_there_is_one_strict_environment() -> None:
    one = environment(TEMPLATES)
    assert one is environment(TEMPLATES)
    assert one.undefined is jinja2.StrictUndefined
    assert one.trim_blocks and one.lstrip_blocks and one.keep_trailing_newline
    assert one.autoescape is False


@pytest.mark.parametrize("variant", [HOST, SM90], ids=lambda variant: variant.name)
def test_constants_say_the_configuration(variant: Variant) -> None:
    text = environment(TEMPLATES).get_template("macros/constants.j2").render(v=variant)
    assert f'constexpr char kVariant[] = "{variant.name}";\n' in text
    assert f"constexpr int kHidden = {variant.hidden};" in text
    assert f"constexpr int kNumRanks = {variant.num_ranks};" in text


@pytest.mark.parametrize("variant", read_table(), ids=lambda variant: variant.name)
def test_every_variant_of_the_table_renders_tidily(variant: Variant) -> None:
    for unit in variant.units:
        text = render(variant, unit)
        assert f'"{variant.name}"' in text and f'#include "{variant.arch_header}"' in text
        assert text.endswith("\n") and not text.endswith("\n\n")
        assert "\n\n\n" not in text and " \n" not in text
        assert "{{" not in text and "{%" not in text
