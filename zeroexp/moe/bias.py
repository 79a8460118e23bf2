"""Balance without a loss: a bias on the scores that select, moved against the load.

Wang et al., arXiv:2408.15664: after a step ``b_e += u * sign(mean load - load_e)``. The weights of
the chosen experts do not see the bias, so nothing disturbs the gradient, and the load of a batch
moves only the batches after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zeroexp.comm import Group


class Bias(nn.Module):
    """The bias of one gate, ``value`` ``[E]`` fp32, a buffer; ``rate`` is u."""

    value: Tensor

    def __init__(self, num_experts: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("value", torch.zeros(num_experts, dtype=torch.float32))
        # Not a buffer: DDP copies rank 0's buffers over everybody's, and these are this rank's.
        self.load: Tensor | None = None

    def reset_parameters(self) -> None:
        self.value.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Bias:
        # A step of 1e-3 is lost in a bf16 number: only the device of a conversion is followed.
        kept = self.value
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.value.dtype != torch.float32:
            device = self.value.device
            self.value = (
                kept.to(device) if not kept.is_meta else kept.new_zeros(kept.shape, device=device)
            )
        return self

    def observe(self, load_E: Tensor) -> None:
        """Count the load of one micro-batch; nothing moves before :meth:`update`."""
        self.load = load_E.clone() if self.load is None else self.load + load_E

    def update(self, load_E: Tensor) -> None:
        """Move by one step against ``load_E``, the tokens per expert over all micro-batches and
        ranks since the last one."""
        load = load_E.to(torch.float32)
        self.value.add_(torch.sign(load.mean() - load), alpha=self.rate)
        self.load = None


def update_biases(model: nn.Module, *groups: Group) -> None:
    """Move every bias of ``model`` once: after an optimizer step, not after a micro-batch.

    The ranks of ``groups`` (all data-parallel ones, and in a pipeline those of the pipe) must call
    this together: their loads are summed, in one exchange a group for all layers.
    """
    biases = [module for module in model.modules() if isinstance(module, Bias)]
    if not biases:
        return
    loads = []
    for bias in biases:
        none = torch.zeros(bias.value.numel(), dtype=torch.int64, device=bias.value.device)
        loads.append(none if bias.load is None else bias.load)
    total = torch.cat(loads)
    for group in groups:
        if group.size > 1:
            total = group.exchange(total, "tokens per expert").sum(0)
    for bias, load in zip(biases, total.split([load.numel() for load in loads]), strict=True):
        bias.update(load)
