"""Small models, settings and plain torch references that the rank tests share."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

STAGES = (0, 1, 2, 3)


def settings(stage: int, **keys: Any) -> dict[str, Any]:
    """A configuration mapping: fp32, no clipping, one micro-batch, unless ``keys`` say otherwise.

    Short names: ``clip``, ``accumulate``, ``compute``, ``timeout``, ``devices``;
    ``zero_x`` is ``zero.x``, ``precision_x`` is ``precision.x``, ``scale_x`` is
    ``precision.loss_scale.x``, ``offload_x`` is ``offload.x`` and ``nvme_x`` is ``offload.nvme.x``.
    """
    zero: dict[str, Any] = {"stage": stage}
    precision: dict[str, Any] = {"compute": keys.pop("compute", "fp32")}
    scale: dict[str, Any] = {}
    offload: dict[str, Any] = {}
    nvme: dict[str, Any] = {}
    sections = {
        "zero": zero,
        "precision": precision,
        "scale": scale,
        "offload": offload,
        "nvme": nvme,
    }
    trainer = {
        "gradient_clip_val": keys.pop("clip", None),
        "accumulate_grad_batches": keys.pop("accumulate", 1),
    }
    out: dict[str, Any] = {"zero": zero, "precision": precision, "trainer": trainer}
    if "timeout" in keys:
        out["launch"] = {"timeout": keys.pop("timeout")}
    if "devices" in keys:
        trainer["devices"] = keys.pop("devices")
    for key, value in keys.items():
        section, _, name = key.partition("_")
        sections[section][name] = value
    if scale:
        precision["loss_scale"] = scale
    if nvme:
        offload["nvme"] = nvme
    if offload:
        out["offload"] = offload
    return out


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters by name, tied ones under each of their names."""
    found = module.named_parameters(remove_duplicate=False)
    return {name: parameter.detach().clone() for name, parameter in found}


def digest(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A hash of the bits of every tensor."""
    return {
        name: hashlib.sha256(t.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
        for name, t in tensors.items()
    }


def furthest(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest absolute difference; infinite when names or shapes differ or something is NaN."""
    if a.keys() != b.keys():
        return float("inf")
    worst = 0.0
    for name, value in a.items():
        if value.shape != b[name].shape:
            return float("inf")
        if value.numel():
            gap = float((value.double() - b[name].double()).abs().max())
            worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def caught(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Class name and message of what ``fn`` raises; ``("", "")`` when it returns."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


class Block(nn.Module):
    """A residual block: causal mixing without biases (no gradient is pure rounding), then an MLP.

    ``extra`` of the first block is used by the root as well, ``fixed`` is frozen.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.extra = nn.Linear(dim, dim, bias=False)
        self.fixed = nn.Linear(dim, dim)
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        x = x + self.down(F.gelu(self.up(x)))
        return x + 0.1 * self.extra(self.fixed(x))


class TinyGPT(nn.Module):
    """Tied head, learned positions, a frozen layer per block, a weight used outside its module."""

    def __init__(self, vocab: int = 37, dim: int = 20, length: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Parameter(torch.randn(length, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        x = x + F.linear(x, self.blocks[0].extra.weight)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def tiny_gpt(dtype: torch.dtype = torch.float32, **kwargs: int) -> TinyGPT:
    torch.manual_seed(1)
    return TinyGPT(**kwargs).to(dtype)


def token_batches(steps: int, sequences: int, length: int = 8) -> list[tuple[Tensor, Tensor]]:
    """``steps`` global batches of ``sequences`` random sequences and their targets."""
    source = torch.Generator().manual_seed(2)
    drawn = torch.randint(0, 37, (steps, sequences, length + 1), generator=source)
    return [(batch[:, :-1], batch[:, 1:]) for batch in drawn]


def micro_batches(
    batch: tuple[Tensor, ...], count: int, part: int | None = None, parts: int | None = None
) -> Iterable[tuple[Tensor, ...]]:
    """This rank's equal part of a global batch (or ``part`` of ``parts``) in ``count`` pieces."""
    part, parts = (rank() if part is None else part), (world() if parts is None else parts)
    mine = [t.chunk(parts)[part] for t in batch]
    return zip(*(t.chunk(count) for t in mine), strict=True)


class MLP(nn.Sequential):
    """Linear layers of the given widths with tanh between them."""

    def __init__(self, *widths: int, bias: bool = True) -> None:
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b, bias=bias), nn.Tanh()]
        super().__init__(*layers[:-1])


def mlp(*widths: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> MLP:
    torch.manual_seed(seed)
    return MLP(*widths).to(dtype)


def regression(steps: int, samples: int, inputs: int, outputs: int) -> list[tuple[Tensor, Tensor]]:
    """``steps`` global batches for a regression, the same on every rank."""
    source = torch.Generator().manual_seed(4)
    return [
        (
            torch.randn(samples, inputs, generator=source),
            torch.randn(samples, outputs, generator=source),
        )
        for _ in range(steps)
    ]


def plain_training(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
    clip: float | None = None,
) -> dict[str, Tensor]:
    """Train in this process on the global batches as torch does it; returns the weights."""
    for x, y in batches:
        optimizer.zero_grad()
        loss(module(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return weights(module)


class Scalar(nn.Module):
    """One weight ``w``; ``forward(c)`` is ``sum(w * c)``, so the gradient is c."""

    def __init__(self, *values: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values, dtype=dtype))

    def forward(self, c: Tensor | float) -> Tensor:
        # In fp32 at least: a half-precision loss could not carry a scale of 65536.
        return (self.w * c if self.w.dtype.itemsize > 2 else self.w.float() * c).sum()


def sgd_engine(module: nn.Module, stage: int, lr: float = 0.1, **keys: Any) -> Any:
    """An engine around ``module`` with plain SGD."""
    from zeroexp.engine import Engine

    return Engine(module, torch.optim.SGD(module.parameters(), lr=lr), settings(stage, **keys))


def step(engine: Any, *inputs: Any) -> float:
    """One forward, backward and step; returns the loss scale afterwards."""
    engine.backward(engine(*inputs))
    engine.step()
    return float(engine.loss_scale)
