"""Random numbers of a gate: the same again after a resume and in a recomputation.

A forward pass that needs noise draws one number, its key, from torch's default generator, however
many tokens there are. What restores that generator restores the noise: a seed, a checkpoint of the
random state, the recomputation of a block (``torch.utils.checkpoint`` with ``preserve_rng_state``).
Ranks share the key and mix their own number into it: one saved state serves them all, and each
still draws for its own tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_STRIDE = 0x9E3779B97F4A7C15  # odd and without pattern: keys of neighbouring ranks lie far apart
_MASK = (1 << 63) - 1


def draw_key(source: torch.Generator | None = None) -> int:
    """A number in [0, 2^63 - 1) from ``source`` (a CPU generator; None: torch's default one)."""
    # The device is named: a model may be built under torch.device("meta"), which draws nothing.
    return int(torch.randint(_MASK, (), generator=source, dtype=torch.int64, device="cpu"))


class Draws:
    """The source of a gate's noise. ``source`` is a CPU generator of the caller's, who then saves
    and restores it; None is torch's default one."""

    def __init__(self, source: torch.Generator | None = None) -> None:
        self.source = source

    def begin(self, device: torch.device) -> torch.Generator:
        """A generator on ``device`` for one forward pass."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        key = (draw_key(self.source) + rank * _STRIDE) & _MASK
        return torch.Generator(device).manual_seed(key)


def gumbel_like(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Standard Gumbel noise of the shape and dtype of ``values``."""
    uniform = torch.rand(
        values.shape, generator=generator, device=values.device, dtype=values.dtype
    )
    tiny = torch.finfo(values.dtype).tiny
    return -torch.log((-torch.log(uniform.clamp_min(tiny))).clamp_min(tiny))
