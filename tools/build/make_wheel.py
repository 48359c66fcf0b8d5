"""Pack files into a wheel; the same files always give the same bytes. Run by wheel.bzl."""

import argparse
import base64
import hashlib
import os
import pathlib
import zipfile

EPOCH = (1980, 1, 1, 0, 0, 0)  # The earliest time that a zip can hold, in place of file times.


class Wheel:
    """A wheel under construction, and the record of what is in it."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._record: list[str] = []

    def add(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """Adds one file and its line of the record."""
        self._write(name, data, mode)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self._record.append(f"{name},sha256={digest},{len(data)}")

    def close(self, record_name: str) -> None:
        """Adds the record itself, the last file of a wheel."""
        self._record.append(f"{record_name},,")
        self._write(record_name, ("\n".join(self._record) + "\n").encode(), 0o644)

    def _write(self, name: str, data: bytes, mode: int) -> None:
        entry = zipfile.ZipInfo(name, EPOCH)
        entry.compress_type = zipfile.ZIP_DEFLATED
        entry.external_attr = (0o100000 | mode) << 16
        self._archive.writestr(entry, data)


def metadata(args: argparse.Namespace, dist: str, version: str) -> str:
    """The text of METADATA: headers, an empty line, the README."""
    headers = [
        "Metadata-Version: 2.1",
        f"Name: {dist}",
        f"Version: {version}",
        f"Summary: {args.summary}",
        "License: MIT",
        f"Requires-Python: =={args.python}.*",
        *(f"Requires-Dist: {line}" for line in args.requires),
        "Description-Content-Type: text/markdown",
    ]
    return "\n".join(headers) + "\n\n" + (args.readme.read_text() if args.readme else "")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
    parser.add_argument("--out", required=True)
    parser.add_argument("--tag", required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--summary", required=True)
    parser.add_argument("--license", type=pathlib.Path)
    parser.add_argument("--readme", type=pathlib.Path)
    parser.add_argument("--requires", action="append", default=[])
    parser.add_argument("--file", action="append", default=[], metavar="NAME=PATH")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    dist, version = os.path.basename(args.out).split("-")[:2]
    info = f"{dist}-{version}.dist-info"
    wheel_text = ["Wheel-Version: 1.0", "Generator: deepep", "Root-Is-Purelib: false"]
    wheel_text += [f"Tag: {args.tag}"]
    with zipfile.ZipFile(args.out, "w") as archive:
        wheel = Wheel(archive)
        for name, path in sorted(pair.split("=", 1) for pair in args.file):
            mode = 0o755 if name.endswith(".so") else 0o644
            wheel.add(name, pathlib.Path(path).read_bytes(), mode)
        if args.license:
            wheel.add(f"{info}/LICENSE", args.license.read_bytes())
        wheel.add(f"{info}/METADATA", metadata(args, dist, version).encode())
        wheel.add(f"{info}/WHEEL", ("\n".join(wheel_text) + "\n").encode())
        wheel.close(f"{info}/RECORD")


if __name__ == "__main__":
    main()
