"""Variant and unit in, source text out, through the one Jinja2 environment.

Called by the command line and by tests. Knows where templates lie; knows nothing of what they say.
"""

import functools
import traceback
from pathlib import Path

import jinja2

from codegen.errors import CodegenError, unknown
from codegen.variant import Variant

TEMPLATES = Path(__file__).parent / "templates"


@functools.cache
def environment(templates: Path) -> jinja2.Environment:
    """Return the environment of a templates folder; rule R6 of codegen/templates/README.md."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # The output is C++, where nothing is to be escaped.
    )


def template_path(variant: Variant, unit: str) -> str:
    """Return the template of a unit, relative to the templates folder."""
    if unit not in variant.units:
        raise unknown(f"unit of {variant.topology}", unit, variant.units)
    return f"{'base' if unit == 'variant' else variant.topology}/{unit}.cu.j2"


def output_path(variant: Variant, unit: str) -> str:
    """Return where the rendering of a unit belongs, relative to the output folder."""
    return f"{variant.name}/{unit}.{variant.source_suffix}"


def render(variant: Variant, unit: str, templates: Path = TEMPLATES) -> str:
    """Return the source text of one unit; every unit begins with macros/banner.j2."""
    path = template_path(variant, unit)
    try:
        template = environment(templates).get_template(path)
        return template.render(v=variant, unit=unit, template=path)
    except jinja2.TemplateNotFound as error:
        raise CodegenError(
            f"template of {variant.name} {unit} is {error.name!r}, but {templates} has no such "
            "file; add it, or correct the name in `extends` or `import`"
        ) from error
    except jinja2.TemplateError as error:
        raise CodegenError(
            f"rendering of {variant.name} {unit} stopped at {_where(error, templates) or path}: "
            f"{error.message}; correct the template, or add the property to codegen/variant.py"
        ) from error


def _where(error: jinja2.TemplateError, templates: Path) -> str:
    """Return `template:line` of the innermost template line that an error passed through."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.name}:{error.lineno}"
    frames = [
        f"{Path(frame.filename).relative_to(templates)}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(templates)
    ]
    return frames[-1] if frames else ""
