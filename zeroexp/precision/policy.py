"""Which dtype computes, travels, accumulates and is stepped."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroexp.config import Config

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Policy:
    """The precision section with every ``auto`` replaced.

    ``compute`` is the dtype of parameters and activations; ``reduce`` of gradients on the wire;
    ``accumulate`` of the buffers gradients are summed in; ``master`` of the copy the optimizer
    steps (``None``: it steps the parameters themselves). ``nonfinite`` says what happens to a step
    with a non-finite gradient.
    """

    compute: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype
    master: torch.dtype | None
    nonfinite: str

    @classmethod
    def from_config(cls, config: Config) -> Policy:
        """Read ``config.precision``; ``config`` must be resolved (no ``auto`` left)."""
        p = config.precision
        compute = _DTYPES[p.compute]
        wide = compute in (torch.float32, torch.float64)
        master = torch.float32 if wide or p.master != "none" else None
        return cls(compute, _DTYPES[p.reduce], _DTYPES[p.accumulate], master, p.nonfinite)

    def storage_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Parameters of ``dtype`` are held in this dtype: floats in ``compute``, integers as they
        are.

        fp64 parameters stay fp64 under fp32 compute: only a half-precision policy narrows what the
        user built.
        """
        if not dtype.is_floating_point:
            return dtype
        if self.compute == torch.float32:
            return dtype
        return self.compute

    def grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of parameters held as ``dtype`` are summed: never narrower than
        asked for."""
        return (
            torch.promote_types(self.accumulate, dtype)
            if dtype == torch.float64
            else self.accumulate
        )

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of parameters held as ``dtype`` travel."""
        return dtype if dtype == torch.float64 else self.reduce

    def master_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Dtype of the stepped copy of parameters held as ``dtype``; ``None`` when they are stepped
        in place."""
        if self.master is None or dtype in (torch.float32, torch.float64):
            return None
        return self.master
