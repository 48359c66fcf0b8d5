"""Rewrite tests/codegen/golden: python -m tools.update_golden [VARIANT ...]

Without names it renders the variants that are there again; with names it renders those, new ones
too. Read the difference before you commit it: it is what a template's change does.
"""

import shutil
import sys
from pathlib import Path

from codegen.errors import CodegenError
from codegen.render import output_path, render
from codegen.variant import Variant

# Resolved, so that `bazel run` too writes to the source tree that its runfiles point to.
GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "codegen" / "golden"


def update(name: str) -> None:
    """Render one variant in place of its golden folder."""
    variant = Variant.parse(name)
    texts = {GOLDEN / output_path(variant, unit): render(variant, unit) for unit in variant.units}
    shutil.rmtree(GOLDEN / name, ignore_errors=True)
    (GOLDEN / name).mkdir(parents=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(GOLDEN.parent.parent.parent))


def main() -> int:
    """Update the variants named, or those there are."""
    names = sys.argv[1:] or sorted(path.name for path in GOLDEN.iterdir())
    try:
        for name in names:
            update(name)
    except CodegenError as error:
        print(f"update_golden: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
