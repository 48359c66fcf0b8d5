"""Decoding with experts spread over ranks: a small model continues sequences, a token at a step.

    python examples/decode.py --ranks 4
    python examples/decode.py --ranks 2 --fp8 --compile
    python examples/decode.py --ranks 8 --device cuda --graph

Every rank has sequences of its own and some of the experts. With --graph a whole step is one CUDA
graph, communication included, which needs a GPU. All steps are compared with the same model in one
piece.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepep import Buffer, fp8
from deepep.nn import ExpertParallelDecode
from deepep.testing import run_processes
from deepep.topology import expert_range
from torch import Tensor
from torch.nn import Module, ModuleList

VOCABULARY, HIDDEN, INNER, EXPERTS, TOPK, LAYERS = 64, 128, 64, 16, 4, 2
TOLERANCE = 2.0**-5  # of the largest value: a few roundings to BF16


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    ranks: int = 2
    sequences: int = 8  # of each rank
    steps: int = 8
    device: str = "cpu"
    fp8: bool = False
    compile: bool = False
    graph: bool = False


class Router(Module):
    """The best experts of a linear map, with weights that add up to one."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (x.float() @ self.weight).softmax(-1).topk(TOPK)
        return ids, weights / weights.sum(-1, keepdim=True)


class Experts(Module):
    """Two matrices each; all rows of an expert at once. Rows that nobody sent come along."""

    up: Tensor
    down: Tensor

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.register_buffer("up", up)
        self.register_buffer("down", down)

    def forward(self, rows: Tensor, *scales_and_counts: Tensor) -> Tensor:
        x = rows.float()
        for scales in scales_and_counts[:-1]:
            group = torch.arange(HIDDEN, device=x.device) // fp8.GROUP_SIZE
            x = x * scales[..., group]
        return torch.bmm(torch.bmm(x, self.up).relu(), self.down).bfloat16()


class Dense(Module):
    """The same without ranks: every token through all experts, of which it keeps its own."""

    def __init__(self, router: Router, experts: Experts, use_fp8: bool) -> None:
        super().__init__()
        self.router, self.experts, self.use_fp8 = router, experts, use_fp8

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.router(x)
        rows = fp8.per_token_cast_to_fp8(x) if self.use_fp8 else (x,)
        copies = (part.expand(EXPERTS, -1, -1) for part in rows)
        every = self.experts(*copies, ids)  # [expert, token, hidden]
        chosen = every.transpose(0, 1).gather(1, ids[..., None].expand(-1, -1, HIDDEN))
        combined: Tensor = (chosen.float() * weights[..., None]).sum(1)
        return combined.bfloat16()


class Model(Module):
    """Embedding, MoE layers with residuals, and the most likely next token. Seeded: every rank, and
    the model in one piece, make the same weights."""

    embedding: Tensor
    head: Tensor

    def __init__(self, make_layer: Callable[[Router, Tensor, Tensor], Module], device: str) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            values: Tensor = torch.randn(shape, generator=g) * shape[-2] ** -0.5
            return values.to(device)

        self.register_buffer("embedding", normal(VOCABULARY, HIDDEN).bfloat16())
        self.register_buffer("head", normal(HIDDEN, VOCABULARY))
        parts = [
            (Router(normal(HIDDEN, EXPERTS)), normal(EXPERTS, HIDDEN, INNER)) for _ in range(LAYERS)
        ]
        self.layers = ModuleList(
            make_layer(router, up, normal(EXPERTS, INNER, HIDDEN)) for router, up in parts
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [sequences] to the last hidden states and the next tokens."""
        x = self.embedding[tokens]
        for layer in self.layers:
            x = x + layer(torch.nn.functional.layer_norm(x.float(), (HIDDEN,)).bfloat16())
        return x, (x.float() @ self.head).argmax(-1)


def capture(model: Module, tokens: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The model's step as a CUDA graph. Its first calls, which choose kernels, come before."""
    cuda: Any = torch.cuda
    for _ in range(2):
        model(tokens)
    torch.cuda.synchronize()
    graph, given = cuda.CUDAGraph(), tokens.clone()
    with cuda.graph(graph):
        results = model(given)

    def step(tokens: Tensor) -> tuple[Tensor, Tensor]:
        given.copy_(tokens)
        graph.replay()
        return results[0].clone(), results[1].clone()

    return step


@torch.no_grad()
def run(group: Any, settings: Settings) -> dict[str, Any]:
    """What each rank does; returns its tokens and how far it was from the model in one piece."""
    device = settings.device
    torch.set_num_threads(1)  # of each rank, on cpu
    if device == "cuda":
        torch.cuda.set_device(group.rank() % torch.cuda.device_count())
    limit = settings.sequences
    size = Buffer.get_low_latency_rdma_size_hint(limit, HIDDEN, group.size(), EXPERTS)
    with Buffer(group, 0, size, low_latency_mode=True, device=device) as buffer:
        mine = expert_range(EXPERTS, buffer.group_size, buffer.rank)

        def parallel(router: Router, up: Tensor, down: Tensor) -> Module:
            experts = Experts(up[mine.start : mine.stop], down[mine.start : mine.stop])
            return ExpertParallelDecode(
                buffer, router, experts, EXPERTS, limit, use_fp8=settings.fp8
            )

        def in_one_piece(router: Router, up: Tensor, down: Tensor) -> Module:
            return Dense(router, Experts(up, down), settings.fp8)

        model, dense = Model(parallel, device), Model(in_one_piece, device)
        tokens = (torch.arange(limit, device=device) * 7 + group.rank()) % VOCABULARY
        step: Callable[[Tensor], tuple[Tensor, Tensor]] = model
        if settings.compile:
            step = torch.compile(model, fullgraph=True, backend="aot_eager")
        if settings.graph:
            step = capture(model, tokens)
        step(tokens)  # the first call compiles, and loads what it needs
        generated, error, states = [tokens], 0.0, []
        begin = time.perf_counter()
        for _ in range(settings.steps):
            state, tokens = step(tokens)
            states.append(state)
            generated.append(tokens)
        generated = [each.cpu() for each in generated]  # waits for a GPU
        seconds = time.perf_counter() - begin
        buffer.check()  # a replay cannot raise
        for before, state in zip(generated, states, strict=False):
            want = dense(before.to(device))[0].float()
            error = max(error, float((state.float() - want).abs().max() / want.abs().max()))
        return {
            "tokens": torch.stack(generated, 1).tolist(),
            "error": error,
            "us": seconds / settings.steps * 1e6,
        }


def parse(argv: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="each a process")
    parser.add_argument("--sequences", type=int, default=8, help="of each rank")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--fp8", action="store_true", help="rows travel in FP8")
    parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True)")
    parser.add_argument("--graph", action="store_true", help="a step is one CUDA graph")
    settings = Settings(**vars(parser.parse_args(argv)))
    if settings.graph and settings.device == "cpu":
        parser.error("--graph needs a GPU: CUDA graphs do not exist on cpu; pass --device cuda")
    if settings.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU; pass --device cpu")
    if settings.graph and settings.compile:
        parser.error("--graph and --compile exclude each other here; choose one")
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(argv)
    results = run_processes(settings.ranks, run, settings, timeout=300)
    for rank, result in enumerate(results):
        shown = " ".join(f"{token:2d}" for token in result["tokens"][0])
        print(f"rank {rank}: {result['us']:.0f} us a step; first sequence {shown}")
    error = max(result["error"] for result in results)
    verdict = "PASSED" if error <= TOLERANCE else "FAILED"
    print(
        f"{verdict}: largest difference from the model in one piece {error:.1e} of {TOLERANCE:.1e}"
    )
    return int(error > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
