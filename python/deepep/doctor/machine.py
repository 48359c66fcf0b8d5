"""All that the doctor looks at, in one place, so that tests put another machine there."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SHARING = """
import os, sys
fd = os.open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", os.O_RDWR)
assert os.pread(fd, 6, 0) == b"deepep", "another file"
"""


class Machine:
    """This machine. Missing files, programs and packages are None, never an exception."""

    def environment(self) -> Mapping[str, str]:
        """Environment variables."""
        return os.environ

    def read(self, path: str) -> str | None:
        """Text of a small file."""
        try:
            return Path(path).read_text(errors="replace")
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        """Whether there is a file, folder or device."""
        return os.path.exists(path)

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted."""
        try:
            return sorted(os.listdir(folder))
        except OSError:
            return []

    def link(self, path: str) -> str | None:
        """Where a symbolic link leads."""
        try:
            return os.readlink(path)
        except OSError:
            return None

    def output(self, command: Sequence[str]) -> str | None:
        """What a program prints, if it is installed and succeeds within half a minute."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout

    def module(self, name: str) -> Any:
        """A Python module, imported; raises whatever its import raises."""
        return importlib.import_module(name)

    def package(self, name: str) -> tuple[str, str] | None:
        """Version and folder of an installed Python package."""
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            return None
        return found.version, str(found.locate_file(""))

    def sharing_error(self) -> str | None:
        """Why another process cannot open this one's memory as ranks do; None when it can."""
        fd = os.memfd_create("deepep-doctor")
        try:
            os.write(fd, b"deepep")
            command = [sys.executable, "-I", "-S", "-c", _SHARING, str(os.getpid()), str(fd)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        finally:
            os.close(fd)
        return None if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2]
