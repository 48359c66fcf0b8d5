"""What a GPU library's kernels take of the machine: ptxas's report, as rows of the manifest.

Knows the words of `nvcc -Xptxas -v`, and where device code lies in a shared library.
"""

import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from codegen.errors import CodegenError

_ENTRY = re.compile(r"Compiling entry function '(?P<symbol>\w+)' for")
_FUNCTION = re.compile(r"Function properties for (?P<symbol>\w+)")
_STACK = re.compile(
    r"(?P<stack_bytes>\d+) bytes stack frame, (?P<spill_store_bytes>\d+) bytes spill stores, "
    r"(?P<spill_load_bytes>\d+) bytes spill loads"
)
_USED = re.compile(r": Used (?P<registers>\d+) registers")
_SHARED = re.compile(r"(?P<shared_bytes>\d+) bytes smem")
# nvcc's name of an anonymous namespace ends in the source's name and a hash.
_NAMESPACE = re.compile(r"_GLOBAL__N__\w*?_cu_[0-9a-f]{8}(?=\d)")
FATBIN_SECTION = ".nv_fatbin"


def kernel_name(symbol: str) -> str:
    """Return a kernel's name as it stands in the source: 'direct_kernel<true>'."""
    found = _NAMESPACE.search(symbol)
    rest = symbol[found.end() :] if found else symbol
    counted = re.match(r"(\d+)", rest)
    if counted is None:
        return symbol
    end = counted.end() + int(counted[1])
    flags = re.match(r"I((?:Lb[01]E)+)E", rest[end:])
    values = ["true" if flag == "1" else "false" for flag in re.findall(r"Lb([01])E", rest[end:])]
    return rest[counted.end() : end] + (f"<{', '.join(values)}>" if flags else "")


def parse(report: str, unit: str) -> list[dict[str, Any]]:
    """Return one row for each kernel of a unit's report, in its order."""
    rows: list[dict[str, Any]] = []
    kernel, is_its_own = "", True  # or of another function, as libraries that are linked have
    for line in report.splitlines():
        if entry := _ENTRY.search(line):
            kernel, is_its_own = entry["symbol"], True
            rows.append({"kernel": kernel_name(kernel), "unit": unit})
            continue
        if function := _FUNCTION.search(line):
            is_its_own = function["symbol"] == kernel
        if not is_its_own:
            continue
        for pattern in (_STACK, _USED, _SHARED):
            if (found := pattern.search(line)) and rows:
                rows[-1] |= {key: int(value) for key, value in found.groupdict().items()}
    for row in rows:
        row.setdefault("shared_bytes", 0)
        if "registers" not in row or "stack_bytes" not in row:
            raise CodegenError(
                f"report on kernel {row['kernel']} of unit {unit} lacks its registers or its stack "
                "frame; compile with -Xptxas -v by an nvcc whose words codegen/resources.py knows"
            )
    return rows


def read(reports: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the rows of all kernels, sorted; a report is named <unit>.o.resources.txt."""
    rows = [row for path in reports for row in parse(path.read_text(), path.name.split(".")[0])]
    return sorted(rows, key=lambda row: (row["unit"], row["kernel"]))


def section_bytes(library: Path, name: str) -> int:
    """Return the size of a section of a 64-bit ELF file; 0 if it has none."""
    data = library.read_bytes()
    if data[:5] != b"\x7fELF\x02":
        return 0
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, offset + i * size) for i in range(count)]
    table = headers[names][4] if headers else 0
    for header in headers:
        start = table + header[0]
        if data[start : data.index(b"\0", start)] == name.encode():
            return int(header[5])
    return 0
