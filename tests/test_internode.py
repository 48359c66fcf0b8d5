"""Installation check of normal mode across nodes: every result, then speed.

    python tests/test_internode.py --num-processes 8 --num-nodes 2
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        tests/test_internode.py --num-nodes 2
    ./bazelw test //tests:test_internode

One machine acts as several nodes where it has more than one of them: --num-nodes splits all ranks
evenly, in their order. Devices and flags as in test_intranode.py. Between machines rows need GPUs;
on the CPU the network between nodes is memory of one machine.
"""

from __future__ import annotations

import argparse
from typing import Any

import deep_ep
import torch
import torch.distributed as dist
from test_intranode import Check, flags, sized
from utils import init_dist, run


class NodesCheck(Check):
    """The same with what a layout and a handle across nodes have more."""

    def __init__(self, args: argparse.Namespace, buffer: deep_ep.Buffer, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        super().__init__(args, buffer)

    def check_nodes(self, per_node: torch.Tensor | None) -> None:
        assert per_node is not None
        in_node = self.copies.unflatten(1, (self.num_nodes, -1)).any(2)
        assert torch.equal(per_node, in_node.sum(0, dtype=torch.int32))

    def rows_until(self, handle: Any) -> list[int]:
        ends: list[int] = handle[6].tolist()
        return ends


def work(local_rank: int, args: argparse.Namespace) -> None:
    """Body of one rank."""
    rank, num_ranks, group = init_dist(local_rank, args.num_processes, args.device)
    if args.num_nodes < 2 or num_ranks % args.num_nodes:
        raise SystemExit(
            f"--num-nodes {args.num_nodes} with {num_ranks} ranks: nodes are at least 2, and all "
            "have the same number of ranks."
        )
    per_node = num_ranks // args.num_nodes
    with deep_ep.Buffer(
        group, int(2e9), explicitly_destroy=True, device=args.device, ranks_per_node=per_node
    ) as buffer:
        check = NodesCheck(args, buffer, args.num_nodes)
        number = check.check_all()
        lines = list(check.measure())
        if rank == 0:
            print(
                f"{args.num_nodes} nodes of {per_node} ranks on {args.device}: {number} "
                "combinations passed, rank 0:"
            )
            print("\n".join(f"  {line}" for line in lines))
            print("  libraries:", *buffer.chosen_variants(), sep="\n    ", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = flags(__doc__)
    parser.add_argument("--num-nodes", type=int, default=2, help="of all ranks (default: 2)")
    run(work, sized(parser.parse_args()))
