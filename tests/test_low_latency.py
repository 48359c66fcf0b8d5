"""Installation check of the low-latency mode among ranks of one machine: every result, then speed.

    python tests/test_low_latency.py --num-processes 4
    torchrun --standalone --nproc-per-node 4 tests/test_low_latency.py
    ./bazelw test //tests:test_low_latency

Each rank takes a GPU where torch sees GPUs and a library for them is installed; --device says
otherwise. With fewer GPUs than ranks, ranks share them. Adapt utils.init_dist to your cluster.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import deep_ep
import torch
import torch.distributed as dist
from deepep import fp8, topology
from utils import bench, calc_diff, gather, init_dist, run, usable_device


class Check:
    """One rank's tokens and Buffer, and what all ranks' routing says must arrive."""

    def __init__(self, args: argparse.Namespace, buffer: deep_ep.Buffer) -> None:
        self.args, self.buffer, self.device = args, buffer, args.device
        self.rank, self.num_ranks = buffer.rank, buffer.group_size
        g = torch.Generator().manual_seed(self.rank)
        x = torch.randn((args.num_tokens, args.hidden), generator=g).bfloat16()
        x[:, -1] = torch.arange(args.num_tokens) % 256  # a token's rows are known by their end
        scores = torch.randn((args.num_tokens, args.num_experts), generator=g).abs() + 1
        ids = scores.topk(args.num_topk, dim=1).indices
        ids[torch.rand(ids.shape, generator=g) < 0.05] = -1
        self.x, self.ids = x.to(self.device), ids.to(self.device)
        self.weights = torch.rand(ids.shape, generator=g).to(self.device)
        self.experts = topology.expert_range(args.num_experts, self.num_ranks, self.rank)
        self.all_x, self.all_ids = gather(self.x), gather(self.ids)

    def dispatch(self, **options: Any) -> Any:
        return self.buffer.low_latency_dispatch(
            self.x, self.ids, self.args.num_tokens, self.args.num_experts, **options
        )

    def check(self, use_fp8: bool, round_scale: bool, ue8m0: bool, hook: bool, copy: bool) -> None:
        """One dispatch and its combine; experts return the rows that they get."""
        stats = torch.zeros(len(self.experts), dtype=torch.int32, device=self.device)
        received, counts, handle, _, receive = self.dispatch(
            cumulative_local_expert_recv_stats=stats,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=ue8m0,
            return_recv_hook=hook,
        )
        if receive is not None:
            receive()
        assert torch.equal(stats, counts)
        rows = self.check_rows(received, counts.tolist(), handle, round_scale)
        y = self.buffer.get_next_low_latency_combine_buffer(handle) if copy else None
        y = torch.empty_like(rows) if y is None else y
        y.copy_(rows)
        out = torch.empty_like(self.x)
        combined, _, receive = self.buffer.low_latency_combine(
            y, self.ids, self.weights, handle, zero_copy=copy, return_recv_hook=hook, out=out
        )
        if receive is not None:
            receive()
        assert combined.data_ptr() == out.data_ptr()
        wanted = torch.where(self.ids >= 0, self.weights, 0.0).sum(1, keepdim=True) * self.x
        diff = calc_diff(combined.float(), wanted.float())
        assert diff < (1e-3 if use_fp8 else 1e-5), f"combined rows differ by {diff}"

    def check_rows(
        self, received: Any, counts: list[int], handle: Any, round_scale: bool
    ) -> torch.Tensor:
        """Rows by expert, source rank and token, as BF16."""
        rows = torch.zeros(
            (len(self.experts), self.num_ranks * self.args.num_tokens, self.args.hidden),
            dtype=torch.bfloat16,
            device=self.device,
        )
        src_info, layout_range = handle[0], handle[1].cpu()
        for e, expert in enumerate(self.experts):
            chosen = [(ids == expert).any(1).nonzero().flatten() for ids in self.all_ids]
            assert counts[e] == sum(map(len, chosen)), f"{counts[e]} rows of expert {expert}"
            assert (layout_range[e] & 0xFFFFFFFF).tolist() == [len(part) for part in chosen]
            n, tokens = counts[e], torch.cat(chosen)
            assert torch.equal(src_info[e, :n].cpu().long(), tokens)
            sent = torch.cat([x[part] for x, part in zip(self.all_x, chosen, strict=True)])
            if not isinstance(received, tuple):
                rows[e, :n] = received[e, :n]
                assert torch.equal(rows[e, :n].cpu(), sent)
                continue
            data, scales = (part[e, :n] for part in received)
            wanted, _ = fp8.per_token_cast_to_fp8(sent, round_scale=round_scale)
            assert torch.equal(data.cpu().view(torch.uint8), wanted.view(torch.uint8))
            rows[e, :n] = fp8.per_token_cast_back(data, scales)
        return rows

    def measure(self) -> Iterator[str]:
        """Lines with latency and bandwidth; every selection counts, as DeepEP does."""
        chosen = int((self.ids >= 0).sum())
        combine_bytes = chosen * self.args.hidden * 2
        dispatch_bytes = chosen * (self.args.hidden + self.args.hidden // 128 * 4 + 16)
        (data, _), _, handle, _, _ = self.dispatch()
        y = self.buffer.empty(*data.shape)
        y.zero_()

        def combine(**options: Any) -> Any:
            return self.buffer.low_latency_combine(y, self.ids, self.weights, handle, **options)

        def in_halves(call: Any) -> None:
            call(return_recv_hook=True)[-1]()

        for name, call, num_bytes in (
            ("dispatch", self.dispatch, dispatch_bytes),
            ("combine", combine, combine_bytes),
            ("dispatch, hook", lambda: in_halves(self.dispatch), dispatch_bytes),
            ("combine, hook", lambda: in_halves(combine), combine_bytes),
        ):
            seconds = bench(call, self.device)
            yield f"{name:16} {seconds * 1e6:10.1f} us {num_bytes / seconds / 1e9:8.2f} GB/s"


def work(local_rank: int, args: argparse.Namespace) -> None:
    """Body of one rank."""
    rank, num_ranks, group = init_dist(local_rank, args.num_processes, args.device)
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        args.num_tokens, args.hidden, num_ranks, args.num_experts
    )
    with deep_ep.Buffer(
        group, 0, size, low_latency_mode=True, explicitly_destroy=True, device=args.device
    ) as buffer:
        check = Check(args, buffer)
        casts = [(False,) * 3, (True, False, False), (True, True, False), (True, True, True)]
        number = 0
        for cast, hook, copy in itertools.product(casts, (False, True), (False, True)):
            check.check(*cast, hook, copy)
            number += 1
        lines = list(check.measure())
        if rank == 0:
            print(f"{num_ranks} ranks on {args.device}: {number} combinations passed, rank 0:")
            print("\n".join(f"  {line}" for line in lines))
            print("  libraries:", *buffer.chosen_variants(), sep="\n    ", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    """Flags; sizes that are not given depend on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--num-processes", type=int, default=8, help="ranks to start (default: 8)")
    add("--num-tokens", type=int, help="tokens of a rank (GPU: 128, CPU: 16)")
    add("--hidden", type=int, help="elements of a row, a multiple of 128 (GPU: 7168, CPU: 1024)")
    add("--num-topk", type=int, default=8, help="experts of a token (default: 8)")
    add("--num-experts", type=int, default=256, help="experts of all ranks (default: 256)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    args = parser.parse_args()
    args.device = args.device or usable_device()
    gpu = args.device == "cuda"
    args.num_tokens = args.num_tokens or (128 if gpu else 16)
    args.hidden = args.hidden or (7168 if gpu else 1024)
    return args


if __name__ == "__main__":
    run(work, arguments())
