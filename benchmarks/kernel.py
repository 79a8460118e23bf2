"""The AdamW kernel against the traffic that Adam cannot avoid, and against torch's fused kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.work import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, WORKS
from zeroexp import ops
from zeroexp.ops.native import native

FLAT_ELEMENTS = 100_000_000


class FlatState:
    """Parameter, gradient and both moments as flat float32 tensors of ``size`` elements."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.p, self.g = (torch.randn(size, generator=generator) for _ in range(2))
        self.m, self.v = torch.zeros(size), torch.zeros(size)
        self.copy = torch.empty(size, dtype=torch.bfloat16)
        self.steps = 0

    def ours(self, *, copy_out: bool = False) -> None:
        """One step of zeroexp's kernel."""
        self.steps += 1
        ops.adamw_(
            self.p,
            self.g,
            self.m,
            self.v,
            step=self.steps,
            lr=LEARNING_RATE,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            copy_out=self.copy if copy_out else None,
        )

    def traffic(self) -> None:
        """Read the four arrays and write the three: what Adam moves, without its arithmetic."""
        kernels = native().kernels
        if kernels is None:
            raise RuntimeError(ops.status().reason)
        kernels.adam_traffic(
            param=self.p.data_ptr(),
            grad=self.g.data_ptr(),
            exp_avg=self.m.data_ptr(),
            exp_avg_sq=self.v.data_ptr(),
            size=self.p.numel(),
            threads=torch.get_num_threads(),
        )


class TorchFused:
    """torch's fused AdamW over a list of tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.params = [nn.Parameter(t) for t in tensors]
        for p in self.params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
        self.optimizer = torch.optim.AdamW(
            self.params,
            lr=LEARNING_RATE,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )
        self.copies = [torch.empty_like(t, dtype=torch.bfloat16) for t in tensors]

    def step(self) -> None:
        self.optimizer.step()

    def step_and_copy(self) -> None:
        """The step, then the bfloat16 copy in a pass of its own."""
        self.optimizer.step()
        for copy, p in zip(self.copies, self.params, strict=True):
            copy.copy_(p.detach())


def _timed(run: Callable[[], None], repeat: int) -> float:
    """Milliseconds of one call, the mean of ``repeat`` calls after one that is not counted."""
    run()
    start = time.perf_counter()
    for _ in range(repeat):
        run()
    return (time.perf_counter() - start) / repeat * 1e3


def _case(
    name: str, what: str, variants: dict[str, Callable[[], None]], rounds: int, repeat: int
) -> dict[str, Any]:
    samples: dict[str, Any] = {variant: [] for variant in variants}
    for index in range(rounds):
        for variant, run in list(variants.items())[:: 1 if index % 2 else -1]:
            if isinstance(samples[variant], str):
                continue
            try:
                samples[variant].append(_timed(run, repeat))
            except RuntimeError as error:
                samples[variant] = str(error)
    return {"name": name, "what": what, "unit": "ms", "samples": samples}


def measure(rounds: int, elements: int = FLAT_ELEMENTS) -> dict[str, Any]:
    """Every case at one and two threads; milliseconds a step."""
    cases = []
    before = torch.get_num_threads()
    # The traffic has a state of its own: it swaps the moments, and a negative second one gives NaN.
    flat, moved = FlatState(elements), FlatState(elements)
    fused = TorchFused([flat.p.clone()])
    shapes = [p.detach() for p in WORKS["gpt10"].model().parameters()]
    shaped = TorchFused(shapes)
    shaped_flat = FlatState(sum(p.numel() for p in shapes))
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            cases += [
                _case(
                    f"flat, {threads} threads",
                    f"{elements / 1e6:g} million float32 in one tensor",
                    {"traffic": moved.traffic, "zeroexp": flat.ours, "torch fused": fused.step},
                    rounds,
                    3,
                ),
                _case(
                    f"flat with bf16 copy, {threads} threads",
                    f"{elements / 1e6:g} million float32 in one tensor, and a bfloat16 copy",
                    {
                        "zeroexp": lambda: flat.ours(copy_out=True),
                        "torch fused + copy_": fused.step_and_copy,
                    },
                    rounds,
                    3,
                ),
                _case(
                    f"gpt10 shapes, {threads} threads",
                    f"{len(shapes)} tensors of gpt10; zeroexp holds them as one flat tensor",
                    {"zeroexp": shaped_flat.ours, "torch fused": shaped.step},
                    rounds,
                    10,
                ),
            ]
    finally:
        torch.set_num_threads(before)
    status = ops.status()
    return {
        "cases": cases,
        "ops": {"compiled": status.compiled, "isa": status.isa, "reason": status.reason},
    }
