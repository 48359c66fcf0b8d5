"""Installation check of normal mode among ranks of one machine: every result, then speed.

    python tests/test_intranode.py --num-processes 4
    torchrun --standalone --nproc-per-node 4 tests/test_intranode.py
    ./bazelw test //tests:test_intranode

Each rank takes a GPU where torch sees GPUs and a library for them is installed; --device says
otherwise. With fewer GPUs than ranks, ranks share them. Adapt utils.init_dist to your cluster.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import deep_ep
import torch
import torch.distributed as dist
from deepep import fp8, topology
from utils import bench, calc_diff, gather, init_dist, run, usable_device

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def as_bf16(x: Payload) -> torch.Tensor:
    """The rows' values."""
    return fp8.per_token_cast_back(*x).bfloat16() if isinstance(x, tuple) else x


class Check:
    """One rank's tokens and Buffer, and what all ranks' routing says must arrive."""

    def __init__(self, args: argparse.Namespace, buffer: deep_ep.Buffer) -> None:
        self.args, self.buffer, self.device = args, buffer, args.device
        self.rank, self.num_ranks = buffer.rank, buffer.group_size
        g = torch.Generator().manual_seed(self.rank)
        shape = (args.num_tokens, args.hidden)
        scores = torch.randn((args.num_tokens, args.num_experts), generator=g).abs() + 1
        self.ids = scores.topk(args.num_topk, dim=1).indices.to(self.device)
        self.weights = torch.full(self.ids.shape, float(self.rank), device=self.device)
        self.by_rank = torch.full(shape, self.rank, dtype=torch.bfloat16, device=self.device)
        self.random = torch.randn(shape, generator=g).bfloat16().to(self.device)
        data, scales = fp8.per_token_cast_to_fp8(self.random)
        self.fp8: Payload = (data, scales.t().contiguous().t())
        self.layout = buffer.get_dispatch_layout(self.ids, args.num_experts)[:4]
        self.config = deep_ep.Config(args.num_sms, 8, 256)
        # From here on, what is expected.
        ranks = range(self.num_ranks)
        owned = [topology.expert_range(args.num_experts, self.num_ranks, rank) for rank in ranks]
        owner_of = torch.tensor([rank for rank in ranks for _ in owned[rank]])
        all_ids = gather(self.ids)
        self.sent = [(owner_of[ids] == self.rank).any(1).nonzero().flatten() for ids in all_ids]
        self.num_received = sum(map(len, self.sent))
        counts = torch.bincount(torch.cat(all_ids).flatten(), minlength=args.num_experts)
        self.counts = counts[owned[self.rank].start : owned[self.rank].stop].tolist()
        owners = owner_of.to(self.device)[self.ids]
        self.copies = torch.stack([(owners == rank).any(1) for rank in ranks], 1)

    def check_layout(self) -> None:
        per_rank, per_node, per_expert, in_rank = self.layout
        self.check_nodes(per_node)
        assert torch.equal(in_rank, self.copies)
        assert torch.equal(per_rank, self.copies.sum(0, dtype=torch.int32))
        mine = torch.bincount(self.ids.flatten(), minlength=self.args.num_experts)
        assert torch.equal(per_expert, mine.int())

    def check_nodes(self, per_node: torch.Tensor | None) -> None:
        """What only a layout across nodes has; see test_internode.py."""
        assert per_node is None

    def rows_until(self, handle: Any) -> list[int]:
        """Rows that this rank got from ranks 0..i."""
        ends: list[int] = handle[0][:, self.rank].tolist()
        return ends

    def dispatch(self, x: Payload, **others: Any) -> Any:
        per_rank, per_node, per_expert, in_rank = self.layout
        return self.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            config=self.config,
            **others,
        )

    def check(self, x: Payload, with_topk: bool, asynchronous: bool, previous: bool) -> None:
        """One dispatch in all its forms, and its combine."""
        events: dict[str, Any] = {"async_finish": asynchronous}
        if previous:
            events["previous_event"] = self.buffer.capture()
            events["allocate_on_comm_stream"] = asynchronous
        topk: dict[str, Any] = {}
        if with_topk:
            topk = {"topk_idx": self.ids, "topk_weights": self.weights}
        recv_x, ids, weights, counts, handle, event = self.dispatch(x, **topk, **events)
        self._wait(event)
        rows = as_bf16(recv_x)
        self.check_rows(rows, as_bf16(x), handle)
        assert counts == self.counts, f"{counts} instead of {self.counts}"
        if with_topk:
            self.check_topk(ids, weights)
            worst = self.args.num_tokens * self.num_ranks
            fixed, fixed_ids, fixed_weights, none, *_ = self.dispatch(
                x, **topk, num_worst_tokens=worst
            )
            n = self.num_received
            assert none == [] and len(fixed_ids) == worst and bool((fixed_ids[n:] == -1).all())
            assert torch.equal(as_bf16(fixed)[:n], rows)
            assert torch.equal(fixed_ids[:n], ids) and torch.equal(fixed_weights[:n], weights)
        again, *_, event = self.buffer.dispatch(x, handle=handle, config=self.config, **events)
        self._wait(event)
        assert torch.equal(as_bf16(again), rows), "a dispatch along the handle gives other rows"
        combined, combined_weights, event = self.buffer.combine(
            rows, handle, topk_weights=weights, config=self.config, **events
        )
        self._wait(event)
        copies = self.copies.sum(1, keepdim=True)
        diff = calc_diff(combined.float(), as_bf16(x).float() * copies)
        assert diff < 5e-6, f"combined rows differ by {diff}"
        if with_topk:
            assert torch.equal(combined_weights, self.weights), "weights do not come back"

    def check_all(self) -> int:
        """Every combination; returns their number."""
        self.check_layout()
        number = 0
        for previous, asynchronous, with_topk in itertools.product((False, True), repeat=3):
            for x in (self.by_rank, self.random, self.fp8):
                self.check(x, with_topk, asynchronous, previous)
                number += 1
        return number

    @staticmethod
    def _wait(event: Any) -> None:
        if event.event is not None:
            event.current_stream_wait()

    def check_rows(self, rows: torch.Tensor, x: torch.Tensor, handle: Any) -> None:
        """Rows by source rank, then by token."""
        assert len(rows) == self.num_received, f"{len(rows)} rows instead of {self.num_received}"
        assert torch.equal(handle.recv_src_idx.cpu().long(), torch.cat(self.sent))
        ends = list(itertools.accumulate(map(len, self.sent)))
        assert self.rows_until(handle) == ends
        if x is self.by_rank:
            for source, block in enumerate(rows.split([len(sent) for sent in self.sent])):
                assert bool((block == source).all()), f"rows of rank {source} hold something else"

    def check_topk(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        assert int(ids.min()) >= -1 and int(ids.max()) < len(self.counts)
        assert torch.bincount(ids[ids >= 0], minlength=len(self.counts)).tolist() == self.counts
        blocks = weights.split([len(sent) for sent in self.sent])
        for source, (block, chosen) in enumerate(
            zip(blocks, ids.split([len(sent) for sent in self.sent]), strict=True)
        ):
            assert torch.equal(block, torch.where(chosen >= 0, float(source), 0.0))

    def measure(self) -> Iterator[str]:
        """Lines with latency and bandwidth; own rows are counted, as DeepEP does."""
        handle = self.dispatch(self.random)[4]
        received = self.buffer.dispatch(self.random, handle=handle)[0]
        bf16_bytes = self.num_received * self.args.hidden * 2
        cached = functools.partial(self.buffer.dispatch, handle=handle, config=self.config)
        operations = {
            "dispatch (BF16)": (lambda: cached(self.random), bf16_bytes),
            "dispatch (FP8)": (lambda: cached(self.fp8), bf16_bytes * (1 + 4 / 128) / 2),
            "combine (BF16)": (
                lambda: self.buffer.combine(received, handle, config=self.config),
                bf16_bytes,
            ),
        }
        for name, (call, num_bytes) in operations.items():
            seconds = bench(call, self.device)
            yield f"{name:16} {seconds * 1e6:10.1f} us {num_bytes / seconds / 1e9:8.2f} GB/s"


def work(local_rank: int, args: argparse.Namespace) -> None:
    """Body of one rank."""
    rank, num_ranks, group = init_dist(local_rank, args.num_processes, args.device)
    with deep_ep.Buffer(group, int(2e9), explicitly_destroy=True, device=args.device) as buffer:
        check = Check(args, buffer)
        number = check.check_all()
        lines = list(check.measure())
        if rank == 0:
            print(f"{num_ranks} ranks on {args.device}: {number} combinations passed, rank 0:")
            print("\n".join(f"  {line}" for line in lines))
            print("  libraries:", *buffer.chosen_variants(), sep="\n    ", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def flags(description: str | None) -> argparse.ArgumentParser:
    """Flags; sizes that are not given depend on the device, see sized()."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--num-processes", type=int, default=8, help="ranks to start (default: 8)")
    add("--num-tokens", type=int, help="tokens of a rank (GPU: 4096, CPU: 256)")
    add("--hidden", type=int, help="elements of a row, a multiple of 128 (GPU: 7168, CPU: 1024)")
    add("--num-topk", type=int, default=8, help="experts of a token (default: 8)")
    add("--num-experts", type=int, default=256, help="experts of all ranks (default: 256)")
    add("--num-sms", type=int, default=24, help="SMs that kernels may use (default: 24)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    return parser


def sized(args: argparse.Namespace) -> argparse.Namespace:
    """The flags with a device, and sizes for it."""
    args.device = args.device or usable_device()
    gpu = args.device == "cuda"
    args.num_tokens = args.num_tokens or (4096 if gpu else 256)
    args.hidden = args.hidden or (7168 if gpu else 1024)
    return args


if __name__ == "__main__":
    run(work, sized(flags(__doc__).parse_args()))
