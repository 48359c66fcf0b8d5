"""Facts about the machine that a result belongs to. Starts nothing and changes nothing."""

from __future__ import annotations

import datetime
import errno
import os
import platform
import stat
from pathlib import Path
from typing import Any

import deepep
import torch

MPS_HINT = (
    "Start CUDA MPS for times that mean something: nvidia-cuda-mps-control -d (it comes with the "
    "driver), with CUDA_MPS_PIPE_DIRECTORY set alike for it and for this program."
)


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model, or its architecture where Linux does not tell."""
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def mps_is_running(folder: Path | None = None) -> bool:
    """Whether a CUDA MPS control daemon listens where this process would look for one."""
    if folder is None:
        folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or Path("/tmp", "nvidia-mps"))
    control = folder / "control"
    try:
        if not stat.S_ISFIFO(control.stat().st_mode):
            return True
        # A pipe that nobody reads cannot be opened for writing without waiting.
        os.close(os.open(control, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno == errno.EACCES
    return True


def use_whole_share() -> None:
    """Lets operations use all of a rank's multiprocessors unless the caller says otherwise: only
    one is measured at a time."""
    os.environ.setdefault("DEEPEP_SM_UTILIZATION", "1")  # the ranks' processes read it


def facts(device: str, name: str = "") -> dict[str, Any]:
    """What a reader needs to judge the numbers; no name of the computer itself."""
    found: dict[str, Any] = {
        "machine": name or cpu_name(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "cpu": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepep": deepep.__version__,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "machine": name or f"{torch.cuda.device_count()} x {properties.name}",
            "cuda": torch.version.cuda,
            "driver": driver_version(),
            "multiprocessors": properties.multi_processor_count,
            "mps": mps_is_running(),
            "mps_thread_percentage": os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""),
            "sm_utilization": os.environ.get("DEEPEP_SM_UTILIZATION", ""),
        }
    return found


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Version of the kernel driver; empty where it does not tell."""
    try:
        words = path.read_text().split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def warnings(device: str, ranks: int, sms: int, found: dict[str, Any]) -> list[str]:
    """What makes times on a GPU unfit to be compared, each in one sentence."""
    if device != "cuda":
        return []
    sharing = -(-ranks // torch.cuda.device_count())
    said = []
    if sharing > 1 and not found["mps"]:
        said.append(
            f"{sharing} ranks share a device without CUDA MPS, so they take turns. {MPS_HINT}"
        )
    total = found["multiprocessors"]
    if sharing * sms > total and not found["mps_thread_percentage"]:
        said.append(
            f"{sharing} ranks x {sms} SMs on a device of {total}: the Buffer uses "
            f"{total // sharing} a rank."
        )
    return said
