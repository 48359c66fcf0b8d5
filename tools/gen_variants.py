"""Adds configurations to the table of variants, and builds them.

    ./bazelw run //tools:gen_variants -- --hidden 3584 --dtype fp8 --ranks 6 --arch sm90,host
    ./bazelw run //tools:gen_variants -- --model path/to/config.json --ranks 8 --build

Every combination of the lists becomes a row. When one is illegal, nothing is written.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from absl import app, flags

from codegen.arch import ARCHS
from codegen.errors import CodegenError, unknown
from codegen.render import TEMPLATES, template_path
from codegen.table import TABLE
from codegen.variant import ELEM_BYTES, MAX_HIDDEN, MAX_NODES, MAX_RANKS, UNITS, Variant
from tools import variant_build, variant_models, variant_rows
from tools.variant_models import KNOWN, Model

MAX_LOCAL_EXPERTS, MAX_TOPK = 1024, 32  # DEEPEP_MAX_... of kernels/abi/deepep_kernel.h.

CLOSED = {"topology": UNITS, "arch": ARCHS, "dtype": ELEM_BYTES}
# How the words of the other flags read: as a pattern, and in words.
FORMS = {
    "hidden": ("any|[1-9][0-9]{0,6}", f"a number from 1 to {MAX_HIDDEN}, or any"),
    "ranks": (
        "any|[1-9][0-9]{0,2}(x[1-9][0-9]{0,2})?",
        f"a number from 1 to {MAX_RANKS}, such a number x 2 to {MAX_NODES} nodes (8x4) for "
        "internode, or any",
    ),
}


def define_flags(to: flags.FlagValues) -> None:
    """Defines the tool's flags; a function, since other tools have flags of the same names."""

    def names(name: str, default: list[str], help: str) -> None:
        flags.DEFINE_list(name, default, help, flag_values=to)

    names("hidden", [], "elements of a token, or any")
    names("dtype", [], "bf16, fp8: what dispatch carries; default: the model's, or both")
    names("ranks", ["8"], "ranks of one memory domain, RANKSxNODES, or any")
    names("arch", ["host", "sm80", "sm90"], "host, sm80, sm90")
    names("topology", ["intranode"], "intranode, lowlatency, internode")
    models = f"takes hidden and dtype from a config.json, or is one of {', '.join(KNOWN)}"
    flags.DEFINE_string("model", None, models, flag_values=to)
    own = "a table of your own, in place of the repository's"
    flags.DEFINE_string("table", None, own, flag_values=to)
    dry = "say what would be added, and write nothing"
    flags.DEFINE_bool("dry_run", False, dry, flag_values=to)
    build = "build and load the variants afterwards"
    flags.DEFINE_bool("build", False, build, flag_values=to)


def name(topology: str, arch: str, hidden: str, dtype: str, ranks: str) -> str:
    """The name that these words make; Variant.parse says whether it is legal."""
    return f"{topology}_{arch}_h{hidden}_{dtype}_r{ranks}"


def combinations(
    topologies: Sequence[str],
    archs: Sequence[str],
    hidden: Sequence[str],
    dtypes: Sequence[str],
    ranks: Sequence[str],
) -> Iterator[str]:
    """Yields names; RANKSxNODES goes with internode, and a bare number with the others."""
    for axes in itertools.product(topologies, archs, hidden, dtypes, ranks):
        one_of_several = len(topologies) > 1 and len(ranks) > 1 and axes[4] != "any"
        if one_of_several and ("x" in axes[4]) != (axes[0] == "internode"):
            continue
        yield name(*axes)


def check_words(axes: Mapping[str, Sequence[str]]) -> None:
    """Refuses words that no name has, once each; `axes` holds those of each flag."""
    refused = []
    for axis, word in dict.fromkeys((name, each) for name in axes for each in axes[name]):
        if axis in CLOSED and word not in CLOSED[axis]:
            refused.append(str(unknown(axis, word, CLOSED[axis])))
        elif axis in FORMS and not re.fullmatch(FORMS[axis][0], word):
            refused.append(f"{axis} is {word!r}, but must be {FORMS[axis][1]}")
    if refused:
        raise CodegenError("\n  ".join(["nothing was added", *refused]))


def check(names: Sequence[str], templates: Path = TEMPLATES) -> list[Variant]:
    """Parses all names.

    Raises:
        CodegenError: one or more are illegal, or have no templates; the text has one line for each.
    """
    rows: list[Variant] = []
    refused: dict[str, list[str]] = {}  # Reason: the names that it refuses.
    for text in names:
        try:
            variant = Variant.parse(text)
            missing = [unit for unit in variant.units if not _has(templates, variant, unit)]
            if missing:
                raise CodegenError(
                    f"topology is {variant.topology}, which has no template for "
                    f"{', '.join(missing)} yet (docs/variants.md); choose another topology"
                )
            rows.append(variant)
        except CodegenError as error:
            refused.setdefault(str(error).removeprefix(f"variant {text}: "), []).append(text)
    if refused:
        lines = [f"{reason} ({_such_as(texts)})" for reason, texts in refused.items()]
        raise CodegenError("\n  ".join(["nothing was added", *lines]))
    return list(dict.fromkeys(rows))


def _such_as(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _has(templates: Path, variant: Variant, unit: str) -> bool:
    return (templates / template_path(variant, unit)).is_file()


def limits(model: Model, rows: Sequence[Variant]) -> Iterator[str]:
    """Warnings about a model that its variants cannot serve as they are."""
    fewest = min((v.num_ranks * v.num_nodes for v in rows if v.num_ranks), default=1)
    if -(-model.experts // fewest) > MAX_LOCAL_EXPERTS:
        yield f"{model.experts} experts on {fewest} ranks: a rank holds at most {MAX_LOCAL_EXPERTS}"
    if model.topk > MAX_TOPK:
        yield f"top {model.topk}: a token may choose at most {MAX_TOPK} experts"


def wanted(given: flags.FlagValues, folder: Path) -> list[Variant]:
    """The variants that the flags ask for; prints what a model was found to need."""
    hidden, dtypes = given.hidden, given.dtype
    model = None
    if given.model:
        model = variant_models.find(given.model, folder)
        print(model)
        hidden, dtypes = hidden or [str(model.hidden)], dtypes or [model.dtype]
    if not hidden:
        raise CodegenError(
            "hidden is not given, but a variant needs one; pass --hidden 3584, --hidden any or "
            "--model config.json"
        )
    axes = {
        "topology": given.topology,
        "arch": given.arch,
        "hidden": hidden,
        "dtype": dtypes or ["bf16", "fp8"],
        "ranks": given.ranks,
    }
    words = {axis: [word.strip() for word in listed] for axis, listed in axes.items()}
    check_words(words)
    names = list(combinations(*words.values()))
    if not names:
        raise CodegenError(
            f"ranks is {','.join(given.ranks)!r}, but none goes with {','.join(given.topology)}; "
            "internode takes RANKSxNODES, the other topologies a number"
        )
    rows = sorted(check(names), key=variant_rows.sort_key)
    for warning in limits(model, rows) if model else ():
        print(f"warning: {warning}")
    return rows


def present(own: Path | None, repository: Path) -> set[str]:
    """Names that need no row: those of the own table, or those that --kernels=gpu already has."""
    if own:
        return set(variant_rows.names(own, variant_rows.OWN))
    return set(variant_build.names_of_set(repository, "gpu"))


def _print_list(title: str, names: Sequence[str]) -> None:
    if names:
        print(f"{title} ({len(names)}):", *names, sep="\n  ")


def run(given: flags.FlagValues, folder: Path, repository: Path) -> int:
    """Does what the flags say; `folder` is where relative paths count from."""
    rows = wanted(given, folder)
    own = folder / given.table if given.table else None
    there = present(own, repository)
    new = [variant for variant in rows if variant.name not in there]
    table, variable = (own, variant_rows.OWN) if own else (repository, variant_rows.EXTRA)
    variant_rows.add(table, variable, new, write=not given.dry_run)
    names = [variant.name for variant in rows]
    _print_list(f"Already in {table}", [text for text in names if text in there])
    verb = "Would add to" if given.dry_run else "Added to"
    _print_list(f"{verb} {table}", [variant.name for variant in new])
    print("Build:  ", variant_build.build_command(names, own))
    print("Package:", variant_build.package_command(rows, own))
    if given.build and not given.dry_run:
        return variant_build.build(rows, own, repository.parent.parent)
    return 0


def call(given: flags.FlagValues, argv: Sequence[str]) -> int:
    """Runs with parsed flags; `argv` is the program's name and what was no flag."""
    if len(argv) > 1:
        print(f"gen_variants: {argv[1]!r} is no flag; lists are joined by commas", file=sys.stderr)
        return 2
    # Bazel starts it elsewhere: relative paths count from where Bazel was called, and the table is
    # the one in the source tree.
    folder = Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    tree = os.environ.get("BUILD_WORKSPACE_DIRECTORY")
    try:
        return run(
            given, folder, Path(tree, "kernels", "variants.bzl") if tree else TABLE.resolve()
        )
    except (CodegenError, OSError) as error:
        print(f"gen_variants: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(lambda argv: call(flags.FLAGS, argv))
