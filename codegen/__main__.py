"""Command line: python -m codegen list | explain | render | manifest | pins; --help says the rest.

Used by the build's rules and by people. Refused input is one message on stderr and exit code 2.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_type_hints

from codegen import manifest
from codegen.arch import Arch
from codegen.errors import CodegenError, nearest
from codegen.render import TEMPLATES, output_path, render, template_path
from codegen.table import TABLE, read_table
from codegen.variant import Variant


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(argv)
    try:
        text = options.command(options)
        if options.output:
            options.output.write_text(text, encoding="utf-8")
        else:
            sys.stdout.write(text)
    except (CodegenError, OSError) as error:
        print(f"codegen: {error}", file=sys.stderr)
        return 2
    return 0


def _list(options: argparse.Namespace) -> str:
    """Text of `list`: the names of the table, in its order."""
    return "".join(f"{variant.name}\n" for variant in read_table(options.table))


def _explain(options: argparse.Namespace) -> str:
    """Text of `explain`: every fact and derived number of a variant, with what it means."""
    variant = _variant(options)
    facts = list(_facts(variant))
    for unit in variant.units:
        template = template_path(variant, unit)
        facts.append((f"unit {unit}", output_path(variant, unit), f"codegen/templates/{template}"))
    wide = max(len(name) for name, _, _ in facts)
    return "".join(f"{name:{wide}}  {value:44}  {meaning}\n" for name, value, meaning in facts)


def _facts(variant: Variant) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, meaning) of a variant's fields, its properties and its architecture."""
    for name, hint in get_type_hints(Variant, include_extras=True).items():
        yield name, str(getattr(variant, name)), hint.__metadata__[0]
    for name, member in vars(Variant).items():
        if isinstance(member, property) and name not in ("units", "arch_facts"):
            yield name, str(getattr(variant, name)), inspect.getdoc(member) or ""
    for name, hint in get_type_hints(Arch, include_extras=True).items():
        if name not in ("name", "header", "source_suffix"):  # Given above, as v's own.
            value = str(getattr(variant.arch_facts, name))
            yield f"arch_facts.{name}", value, hint.__metadata__[0]


def _render(options: argparse.Namespace) -> str:
    """Text of `render`: one unit's source."""
    return render(_variant(options), options.unit, options.templates)


def _manifest(options: argparse.Namespace) -> str:
    """Text of `manifest`: the rows of all libraries given."""
    sources: dict[str, list[Path]] = {}
    for name, path in options.source:
        sources.setdefault(name, []).append(Path(path))
    reports: dict[str, list[Path]] = {}
    for name, path in options.resources:
        reports.setdefault(name, []).append(Path(path))
    toolchain: dict[str, dict[str, str]] = {}
    for name, (key, value) in options.toolchain:
        toolchain.setdefault(name, {})[key] = value
    return manifest.dumps(
        manifest.row(
            Variant.parse(name),
            Path(library),
            [*sources.get(name, []), *options.header],
            toolchain.get(name),
            reports.get(name, []),
        )
        for name, library in options.library
    )


def _pins(options: argparse.Namespace) -> str:
    """Text of `pins`: name and sha256 of all libraries given."""
    libraries = {name: Path(library) for name, library in options.library}
    return manifest.pins(libraries, options.expect)


def _variant(options: argparse.Namespace) -> Variant:
    """Parse the name given; when refused, add the nearest name of the table, if it can be read."""
    try:
        return Variant.parse(options.name)
    except CodegenError as error:
        try:
            known = [variant.name for variant in read_table(options.table)]
        except (CodegenError, OSError):
            raise error from None
        raise CodegenError(f"{error}{nearest(options.name, known)}") from None


def _pair(text: str) -> tuple[str, str]:
    """Split NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} must read NAME=VALUE")
    return name, value


def _fact(text: str) -> tuple[str, tuple[str, str]]:
    """Split NAME=KEY=VALUE."""
    name, fact = _pair(text)
    return name, _pair(fact)


def _parser() -> argparse.ArgumentParser:
    """The commands and their arguments; @FILE reads arguments from a file, one a line."""
    parser = argparse.ArgumentParser(prog="codegen", fromfile_prefix_chars="@")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help, fromfile_prefix_chars="@")
        sub.set_defaults(command=run)
        sub.add_argument("-o", "--output", type=Path, help="write here instead of to stdout")
        sub.add_argument("--table", type=Path, default=TABLE, help="the table of variants")
        return sub

    def repeated(name: str, metavar: str, kind: Callable[[str], object], help: str) -> None:
        rows.add_argument(name, metavar=metavar, type=kind, action="append", default=[], help=help)

    def libraries(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub.add_argument("library", nargs="+", type=_pair, metavar="NAME=LIBRARY")
        return sub

    command("list", _list, "print the names of the table")
    explain = command("explain", _explain, "print what a variant's name stands for")
    source = command("render", _render, "print the source of one unit of a variant")
    for sub in (explain, source):
        sub.add_argument("name", help="a variant, such as intranode_sm90_h7168_fp8_r8")
    source.add_argument("unit", help="variant, notify, dispatch or combine")
    source.add_argument("--templates", type=Path, default=TEMPLATES, help="the templates folder")
    rows = libraries(command("pins", _pins, "print NAME@SHA256 of built libraries"))
    repeated("--expect", "NAME@SHA256", str, "refuse a library that came out otherwise")
    rows = libraries(command("manifest", _manifest, "print the manifest of built libraries"))
    repeated("--source", "NAME=FILE", _pair, "a generated source, for the row's sources_sha256")
    repeated("--resources", "NAME=FILE", _pair, "what ptxas said of a unit's kernels")
    repeated("--header", "FILE", Path, "a header of all variants, for their sources_sha256")
    repeated("--toolchain", "NAME=KEY=VALUE", _fact, "what a library was built with")
    return parser


if __name__ == "__main__":
    sys.exit(main())
