"""Makes a built-in model with weights that depend on the seed and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zeroexp.config.sections import ModelConfig, MoeConfig
from zeroexp.errors import ModelError
from zeroexp.models.registry import FAMILIES


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from generators at ``seed`` inside, and leave torch's as they were."""
    # A context on the GPU is made by whoever chose that device, never by asking here.
    initialized = torch.cuda.is_initialized()
    devices = [torch.cuda.current_device()] if initialized else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def build(
    model: ModelConfig, moe: MoeConfig | None = None, *, seed: int, recompute: bool = False
) -> nn.Module:
    """The module of ``model``, in fp32, on torch's current default device; ``moe`` None is dense.

    The weights follow from ``seed``; torch's generators are left as they were, so later draws
    (dropout) do not depend on the model's size. Raises :class:`ModelError` if the kind is not built
    in, :class:`ConfigError` for sizes that do not fit together.
    """
    if model.kind not in FAMILIES:
        raise ModelError(
            f"model.kind={model.kind} is not built in; there are {', '.join(FAMILIES)}"
        )
    with seeded(seed):
        return FAMILIES[model.kind].build(model, moe or MoeConfig(), recompute)
