"""Training with experts spread over ranks: a step of normal mode that fits in one CUDA graph.

    python examples/train.py --ranks 4
    python examples/train.py --ranks 8 --device cuda --graph

Every rank has tokens of its own in each step, and some of the experts, which learn to do what
a linear map does. With num_worst_tokens no size depends on data and the host waits for no count.
So with --graph forward, backward and update are captured once and replayed, with tokens that go to
other experts each time, which needs a GPU; without it the same steps run eagerly. All steps are
compared with the same model in one piece.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepep import Buffer
from deepep.nn import ExpertParallel
from deepep.testing import run_processes
from deepep.topology import expert_range
from torch import Tensor
from torch.nn import Module, Parameter, functional

HIDDEN, INNER, EXPERTS, TOPK = 128, 64, 16, 4
RATE = 4.0  # of gradient descent; the loss is a mean over many elements
TOLERANCE = 2.0**-5  # of the largest value: a few roundings to BF16

Step = Callable[[Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    ranks: int = 2
    tokens: int = 32  # of each rank
    steps: int = 20
    device: str = "cpu"
    graph: bool = False


def normal(seed: int, *shape: int, device: str) -> Tensor:
    """The same numbers on every rank."""
    values: Tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device)


class Router(Module):
    """The best experts of a linear map, with weights that add up to one. It does not learn: its
    gradients would have to be averaged over ranks, as those of any parameter that all have."""

    weight: Tensor

    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("weight", normal(1, HIDDEN, EXPERTS, device=device) * HIDDEN**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (x.float() @ self.weight).softmax(-1).topk(TOPK)
        return ids, weights / weights.sum(-1, keepdim=True)


class Experts(Module):
    """Two matrices each."""

    def __init__(self, mine: range, device: str) -> None:
        super().__init__()
        up = normal(2, EXPERTS, HIDDEN, INNER, device=device) * HIDDEN**-0.5
        down = normal(3, EXPERTS, INNER, HIDDEN, device=device) * INNER**-0.5
        self.initial = up[mine.start : mine.stop], down[mine.start : mine.stop]
        self.up, self.down = (Parameter(value.clone()) for value in self.initial)

    @torch.no_grad()
    def changes(self) -> list[Tensor]:
        """What training did to the parameters."""
        return [self.up - self.initial[0], self.down - self.initial[1]]

    def every(self, rows: Tensor) -> Tensor:
        """[m, H] to what each expert makes of each row: [El, m, H]."""
        return functional.gelu(rows.float() @ self.up) @ self.down

    def forward(self, rows: Tensor, num_rows_per_expert: Tensor) -> Tensor:
        """Each expert keeps the results for its own rows, so that all shapes are fixed; a grouped
        matrix product would not compute the others."""
        ends = num_rows_per_expert.cumsum(0)[:, None]
        place = torch.arange(rows.shape[0], device=rows.device)
        own = (place >= ends - num_rows_per_expert[:, None]) & (place < ends)  # [El, m]
        return torch.where(own[..., None], self.every(rows), 0.0).sum(0).to(rows.dtype)


class Dense(Module):
    """The same without ranks: every token through all experts, of which it keeps its own."""

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.router(x)
        chosen = self.experts.every(x).transpose(0, 1)
        chosen = chosen.gather(1, ids[..., None].expand(-1, -1, HIDDEN))
        combined: Tensor = (chosen * weights[..., None]).sum(1)
        return combined.bfloat16()


def make_step(layer: Module, experts: Experts, num_ranks: int, device: str) -> Step:
    """Forward, backward and update for bfloat16 [T, H], the tokens of so many ranks."""
    target = normal(4, HIDDEN, HIDDEN, device=device) * HIDDEN**-0.5
    parameters = list(experts.parameters())

    def step(x: Tensor) -> dict[str, Tensor]:
        x = x.detach().requires_grad_()  # as if a layer below had made it
        output = layer(x)
        # Summed over ranks, since each expert learns from the tokens of all of them.
        loss = (output.float() - x.detach().float() @ target).square().mean() * num_ranks
        x_grad, *gradients = torch.autograd.grad(loss, [x, *parameters])
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(RATE * gradient)
        return {"output": output.detach(), "x_grad": x_grad, "loss": loss.detach() / num_ranks}

    return step


def warm_up(step: Step, experts: Experts, x: Tensor) -> None:
    """The first calls, which choose kernels and load what they need; undoes what they changed."""
    for _ in range(2):
        step(x)
    with torch.no_grad():
        for parameter, value in zip(experts.parameters(), experts.initial, strict=True):
            parameter.copy_(value)


def capture(step: Step, x: Tensor) -> Step:
    """The step as a CUDA graph."""
    cuda: Any = torch.cuda
    torch.cuda.synchronize()
    graph, given = cuda.CUDAGraph(), x.clone()
    with cuda.graph(graph):
        results = step(given)

    def replay(x: Tensor) -> dict[str, Tensor]:
        given.copy_(x)
        graph.replay()
        return {name: result.clone() for name, result in results.items()}

    return replay


def tokens_of(step: int, settings: Settings) -> Tensor:
    """Tokens of all ranks, one after the other: bfloat16 [ranks * T, H]."""
    shape = (settings.ranks * settings.tokens, HIDDEN)
    return normal(10 + step, *shape, device=settings.device).bfloat16()


@torch.no_grad()
def difference(got: Tensor, wanted: Tensor) -> float:
    """The largest, relative to the largest value."""
    return float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())


def run(group: Any, settings: Settings) -> dict[str, Any]:
    """What each rank does; returns its losses and how far it was from the model in one piece."""
    device = settings.device
    torch.set_num_threads(1)  # of each rank, on cpu
    if device == "cuda":
        torch.cuda.set_device(group.rank() % torch.cuda.device_count())
    held = slice(group.rank() * settings.tokens, (group.rank() + 1) * settings.tokens)
    batches = [tokens_of(step, settings) for step in range(settings.steps)]
    local = expert_range(EXPERTS, settings.ranks, group.rank())
    experts = Experts(local, device)
    with Buffer(group, device=device) as buffer:
        worst = settings.ranks * settings.tokens  # as if all tokens of all ranks came to this one
        layer = ExpertParallel(buffer, Router(device), experts, EXPERTS, num_worst_tokens=worst)
        step = make_step(layer, experts, 1, device)
        warm_up(step, experts, batches[0][held])
        if settings.graph:
            step = capture(step, batches[0][held])
        begin = time.perf_counter()
        results = [step(batch[held]) for batch in batches]
        losses = [float(result["loss"]) for result in results]  # waits for a GPU
        seconds = time.perf_counter() - begin
        buffer.check()  # a replay cannot raise

    every = Experts(range(EXPERTS), device)
    in_one_piece = make_step(Dense(Router(device), every), every, settings.ranks, device)
    errors = []
    for batch, result in zip(batches, results, strict=True):
        whole = in_one_piece(batch)
        errors += [difference(result[name], whole[name][held]) for name in ("output", "x_grad")]
    for change, wanted in zip(experts.changes(), every.changes(), strict=True):
        errors.append(difference(change, wanted[local.start : local.stop]))
    return {"losses": losses, "error": max(errors), "us": seconds / settings.steps * 1e6}


def parse(argv: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="each a process, at most 16")
    parser.add_argument("--tokens", type=int, default=32, help="of each rank in each step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--graph", action="store_true", help="a step is one CUDA graph")
    settings = Settings(**vars(parser.parse_args(argv)))
    if not 1 <= settings.ranks <= EXPERTS:
        parser.error(f"--ranks {settings.ranks}: must be 1 to {EXPERTS}, an expert for each")
    if settings.graph and settings.device == "cpu":
        parser.error("--graph needs a GPU: CUDA graphs do not exist on cpu; pass --device cuda")
    if settings.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU; pass --device cpu")
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(argv)
    results = run_processes(settings.ranks, run, settings, timeout=300)
    for rank, result in enumerate(results):
        first, last = result["losses"][0], result["losses"][-1]
        print(f"rank {rank}: {result['us']:.0f} us a step; loss {first:.3f} -> {last:.3f}")
    error = max(result["error"] for result in results)
    verdict = "PASSED" if error <= TOLERANCE else "FAILED"
    print(
        f"{verdict}: largest difference from the model in one piece {error:.1e} of {TOLERANCE:.1e}"
    )
    return int(error > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
