"""What moves to a rank's device, and who moves it."""

from __future__ import annotations

import torch
from torch import nn


def move(module: nn.Module, device: torch.device, parameters: bool) -> None:
    """Move ``module`` to ``device``; without ``parameters`` only what the engine does not move.

    At stage 3 the parameters stay where they are: the engine copies them to the device unit by
        unit,
    and the device may be too small for all of them.
    """
    if parameters or device.type == "cpu":
        module.to(device)
        return
    for part in module.modules():
        if next(part.parameters(), None) is None:
            part.to(device)  # metrics hold state that is no buffer
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
