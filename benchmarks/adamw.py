"""AdamW on the CPU: zeroexp's kernel against the traffic floor and torch's fused kernel.

    python benchmarks/adamw.py [--threads 1 2] [--rounds 9] [--json out.json]
    ZEROEXP_ISA=avx2 python benchmarks/adamw.py

Every contender runs once per round, in turn, in one process: only ratios inside a round mean
anything on a machine whose bandwidth drifts. Printed: million elements per second (median over the
rounds, and best) and the median ratio with its range; the ratio of the bests is the one that other
work on the machine disturbs least. The floor moves the bytes of a step (four reads and three writes
of fp32) without its arithmetic. "huge" is flat state in `ops.host_zeros`, as a shard may hold it;
the other rows use torch's allocator. 100 million elements take 6 GB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroexp import ops
from zeroexp._C import Kernels
from zeroexp.ops.native import native

Contender = Callable[[], None]

HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def gpt_shapes(dim: int = 320, layers: int = 7, vocab: int = 4096) -> list[tuple[int, ...]]:
    """The parameter shapes of a GPT of about 10 million elements."""
    block = [(dim,), (3 * dim, dim), (dim, dim), (dim,), (4 * dim, dim), (dim, 4 * dim)]
    return [(vocab, dim), *(shape for _ in range(layers) for shape in block), (dim,)]


def fresh(shapes: list[tuple[int, ...]], scale: float) -> list[Tensor]:
    return [torch.randn(shape) * scale for shape in shapes]


def torch_fused(params: list[Tensor], grads: list[Tensor]) -> torch.optim.AdamW:
    leaves = [torch.nn.Parameter(p) for p in params]
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad
    return torch.optim.AdamW(
        leaves,
        lr=HYPER["lr"],
        betas=(HYPER["beta1"], HYPER["beta2"]),
        eps=HYPER["eps"],
        weight_decay=HYPER["weight_decay"],
        fused=True,
    )


@dataclass
class Flat:
    """Parameter, gradient and moments of one flat shard."""

    p: Tensor
    g: Tensor
    m: Tensor
    v: Tensor
    low: Tensor
    step: int = 0

    @staticmethod
    def of(size: int, empty: Callable[[int, torch.dtype], Tensor]) -> Flat:
        p, g, m, v = (empty(size, torch.float32) for _ in range(4))
        p.normal_()
        g.normal_().mul_(1e-3)
        m.zero_()
        v.zero_()
        return Flat(p, g, m, v, empty(size, torch.bfloat16))

    def traffic(self, kernels: Kernels, threads: int) -> None:
        p, g, m, v = (t.data_ptr() for t in (self.p, self.g, self.m, self.v))
        size = self.p.numel()
        kernels.adam_traffic(param=p, grad=g, exp_avg=m, exp_avg_sq=v, size=size, threads=threads)

    def adamw(self, copy: bool) -> None:
        self.step += 1
        low = self.low if copy else None
        ops.adamw_(
            self.p,
            self.g,
            self.m,
            self.v,
            step=self.step,
            lr=HYPER["lr"],
            beta1=HYPER["beta1"],
            beta2=HYPER["beta2"],
            eps=HYPER["eps"],
            weight_decay=HYPER["weight_decay"],
            copy_out=low,
        )


def contenders(shapes: list[tuple[int, ...]], threads: int) -> dict[str, Contender]:
    size = sum(torch.Size(s).numel() for s in shapes)
    flat = Flat.of(size, lambda n, dtype: torch.empty(n, dtype=dtype))
    huge = Flat.of(size, ops.host_zeros)
    kernels = native().kernels or Kernels()
    fused = torch_fused(fresh(shapes, 1.0), fresh(shapes, 1e-3))
    weights = fused.param_groups[0]["params"]
    lows = [torch.empty_like(w, dtype=torch.bfloat16) for w in weights]

    def fused_step() -> None:
        fused.step()

    def fused_copy() -> None:
        fused.step()
        with torch.no_grad():
            for to, weight in zip(lows, weights, strict=True):
                to.copy_(weight)

    return {
        "floor": lambda: flat.traffic(kernels, threads),
        "floor huge": lambda: huge.traffic(kernels, threads),
        "zeroexp": lambda: flat.adamw(copy=False),
        "zeroexp huge": lambda: huge.adamw(copy=False),
        "torch fused": fused_step,
        "zeroexp + bf16 copy": lambda: flat.adamw(copy=True),
        "zeroexp huge + bf16 copy": lambda: huge.adamw(copy=True),
        "torch fused + copy_": fused_copy,
    }


RATIOS = [
    ("zeroexp", "floor"),
    ("zeroexp huge", "floor huge"),
    ("zeroexp", "torch fused"),
    ("zeroexp huge", "torch fused"),
    ("zeroexp + bf16 copy", "torch fused + copy_"),
    ("zeroexp huge + bf16 copy", "torch fused + copy_"),
    ("torch fused", "floor"),
]


def measure(shapes: list[tuple[int, ...]], threads: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    runs = contenders(shapes, threads)
    size = sum(torch.Size(s).numel() for s in shapes)
    repeats = max(1, 40_000_000 // size)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for index in range(rounds + 1):
        for name in order if index % 2 else order[::-1]:
            start = time.perf_counter()
            for _ in range(repeats):
                runs[name]()
            if index:  # the first round warms up
                seconds[name].append((time.perf_counter() - start) / repeats)
    speed = {name: size / statistics.median(s) / 1e6 for name, s in seconds.items()}
    best = {name: size / min(s) / 1e6 for name, s in seconds.items()}
    ratios = {}
    for a, b in RATIOS:
        values = sorted(y / x for x, y in zip(seconds[a], seconds[b], strict=True))
        ratios[f"{a} / {b}"] = {
            "median": statistics.median(values),
            "low": values[0],
            "high": values[-1],
            "of_bests": best[a] / best[b],
        }
    return {
        "threads": threads,
        "elements": size,
        "million_per_s": speed,
        "best_million_per_s": best,
        "speed_ratio": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--elements", type=int, default=100_000_000, help="0: GPT shapes only")
    parser.add_argument("--json")
    args = parser.parse_args()
    print(ops.status())
    results = []
    cases: dict[str, list[tuple[int, ...]]] = {
        "one flat tensor": [(args.elements,)],
        "GPT shapes": gpt_shapes(),
    }
    if args.elements == 0:
        del cases["one flat tensor"]
    for case, shapes in cases.items():
        for threads in args.threads:
            result = measure(shapes, threads, args.rounds)
            results.append({"case": case, **result})
            print(f"\n{case}, {result['elements']} elements, {threads} threads")
            for name, value in result["million_per_s"].items():
                top = result["best_million_per_s"][name]
                print(f"  {name:<26} {value:8.0f} M elements/s (best {top:.0f})")
            for name, r in result["speed_ratio"].items():
                span = f"{r['low']:.2f}..{r['high']:.2f}"
                print(f"  {name:<48} {r['median']:5.2f} ({span}; of bests {r['of_bests']:.2f})")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
