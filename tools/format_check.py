"""Check C++ and CUDA with clang-format: python -m tools.format_check [--fix]

Covers what people wrote under kernels/ and the golden renderings, which stand for the templates: a
template is not C++ and is never formatted itself, so for a rendering --fix changes nothing.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".cuh", ".cc", ".cu"}


def sources(folder: Path) -> list[str]:
    """Return the C++ and CUDA files under a folder."""
    return sorted(str(path) for path in folder.rglob("*") if path.suffix in SUFFIXES)


def find_clang_format() -> str | None:
    """Return clang-format: the one installed beside this Python, or the one on the PATH."""
    beside = Path(sys.executable).parent / "clang-format"
    return str(beside) if beside.exists() else shutil.which("clang-format")


def main() -> int:
    """Return 0 when all files are formatted, 1 when not, 2 when that cannot be known."""
    program = find_clang_format()
    if program is None:
        print("format_check: no clang-format found; run: pip install clang-format", file=sys.stderr)
        return 2
    written, rendered = sources(ROOT / "kernels"), sources(ROOT / "tests" / "codegen" / "golden")
    if "--fix" in sys.argv[1:]:
        subprocess.run([program, "-i", *written], cwd=ROOT, check=True)
    check = [program, "--dry-run", "-Werror", *written, *rendered]
    return 1 if subprocess.run(check, cwd=ROOT, check=False).returncode else 0


if __name__ == "__main__":
    sys.exit(main())
