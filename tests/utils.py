"""What the installation checks share. Adapt init_dist to your cluster.

Used as `from utils import ...` by the scripts beside it, which run without Bazel too.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepep import registry


def under_torchrun() -> bool:
    """Whether torchrun started this process as one rank of many."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def choose_port() -> None:
    """Sets MASTER_PORT where nothing does and all ranks are here, for several checks at a time."""
    if int(os.getenv("WORLD_SIZE", "1")) == 1 and "MASTER_PORT" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])


def init_dist(local_rank: int, num_local_ranks: int, device: str = "cpu") -> tuple[int, int, Any]:
    """Joins the process group of all ranks, and on a GPU chooses this rank's.

    Without torchrun, `WORLD_SIZE` and `RANK` count nodes, as DeepEP's tests have it: each of them
    starts num_local_ranks processes. MASTER_ADDR and MASTER_PORT say where they meet.

    Args:
        local_rank: number of this process on its machine; torchrun's own is used under torchrun.
        num_local_ranks: processes on this machine.
        device: "cpu", or "cuda": rank i takes GPU i mod the number of GPUs.

    Returns:
        rank, number of ranks, group.
    """
    if under_torchrun():
        local_rank = int(os.environ["LOCAL_RANK"])
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        node, num_nodes = int(os.getenv("RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
        rank = node * num_local_ranks + local_rank
        num_ranks = num_nodes * num_local_ranks
    if device == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
        # Without a name service the machine's own name may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address, port = os.getenv("MASTER_ADDR", "127.0.0.1"), os.getenv("MASTER_PORT", "8361")
    # For the first contact and for checks, on both devices; rows do not go this way.
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=num_ranks
    )
    return rank, num_ranks, dist.group.WORLD


def usable_device() -> str:
    """ "cuda" where torch sees a GPU and a library for one is installed, else "cpu"."""
    usable = torch.cuda.is_available() and any(
        entry.arch != "host" for entry in registry.variants()
    )
    return "cuda" if usable else "cpu"


def run(work: Callable[[int, Any], None], flags: Any) -> None:
    """Calls work(local_rank, flags): once under torchrun, else in flags.num_processes processes."""
    if under_torchrun():
        work(int(os.environ["LOCAL_RANK"]), flags)
    else:
        choose_port()
        torch.multiprocessing.spawn(work, args=(flags,), nprocs=flags.num_processes)


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor; sizes may differ."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tensor.cpu())
    return gathered


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """DeepEP's measure of difference: 0 for equal tensors, about the squared relative error."""
    if x.numel() == 0:
        return 0.0
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def bench(
    call: Callable[[], object], device: str, num_warmups: int = 5, num_tests: int = 20
) -> float:
    """Mean seconds of a call that all ranks make, over all but the first of `num_tests`."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(num_warmups):
        call()
    seconds = []
    for _ in range(num_tests + 1):
        wait()
        dist.barrier()
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return sum(seconds[1:]) / num_tests
