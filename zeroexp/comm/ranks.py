"""How many ranks there are, where a configuration does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


def with_ranks(partial: Mapping[str, Any]) -> Mapping[str, Any]:
    """``partial`` with the ranks that exist, where it says nothing about them."""
    trainer = dict(partial.get("trainer") or {})
    if dist.is_initialized() and not {"devices", "num_nodes"} & set(trainer):
        trainer["devices"] = dist.get_world_size()
        return {**partial, "trainer": trainer}
    return partial
