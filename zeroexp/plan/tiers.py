"""Where each segment is at home, and what moves between tiers in one step.

Ren et al. (ZeRO-Offload, arXiv:2101.06840, section 4): gradients go down, parameters come up, and
nothing else of a step crosses. Over all ranks of a replica that is one gradient and one parameter
of each element.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroexp.config import Config, steps_in_backward
from zeroexp.layout import Layout, Segment
from zeroexp.placement import StatePlacement, Tier, leaving, place
from zeroexp.plan.formats import UnitUse, formats, is_floating


def homes(config: Config, layout: Layout) -> list[StatePlacement]:
    """The placement of every segment of ``layout``, in its order."""
    stage, offload = config.zero.stage, config.offload
    optim, params = Tier(offload.optim_tier), Tier(offload.params_tier)
    away = place(stage, optim=optim, params=params)
    stays = away.kept_on_device()
    out = leaving_segments(config, layout)
    return [
        away if index in out or not segment.trainable else stays
        for index, segment in enumerate(layout.segments)
    ]


def leaving_segments(config: Config, layout: Layout) -> dict[int, int]:
    """Index in the layout of every segment whose optimizer state leaves the device, with the
    elements of it that one rank keeps."""
    shares = optimizer_shares(config, layout)
    if config.offload.optim_tier == "device":
        return {}
    indices = list(shares)
    chosen = leaving([shares[i] for i in indices], config.offload.fraction)
    return {indices[i]: shares[indices[i]] for i in sorted(chosen)}


def optimizer_shares(config: Config, layout: Layout) -> dict[int, int]:
    """Elements of optimizer state of one slot that one rank keeps, by index of the segment."""
    sharded = place(config.zero.stage).optim.sharded
    return {
        index: segment.shard_size if sharded else segment.size
        for index, segment in enumerate(layout.segments)
        if segment.trainable
    }


def transfers(config: Config, layout: Layout, uses: Sequence[UnitUse]) -> dict[str, int]:
    """Bytes of one rank and step between the device and other tiers: gradients, and parameters
    that the device has stepped for another tier, ``down``; parameters ``up``. ``uses`` are those of
    each unit."""
    down = up = 0
    for use, segment, home in _placed(config, layout, uses):
        sizes = formats(config, segment, home)
        optim = _elements(segment, home.optim.sharded)
        leaves = segment.trainable and home.optim.tier is not Tier.DEVICE
        if leaves:
            times = use.reduced if home.grads.sharded else 1
            down += optim * sizes.grad * times
        if is_floating(segment) and home.params.tier is not Tier.DEVICE:
            # Fetched before each use and dropped after it.
            params = _elements(segment, home.params.sharded)
            up += params * sizes.param * use.whole
            if segment.trainable and not leaves:
                down += optim * sizes.param
        elif leaves:
            up += optim * sizes.param
    return {way: nbytes for way, nbytes in (("down", down), ("up", up)) if nbytes}


def file_traffic(config: Config, layout: Layout, uses: Sequence[UnitUse]) -> dict[str, int]:
    """Bytes of one rank and step from and to swap files; ``uses`` as in :func:`transfers`."""
    read = written = 0
    for use, segment, home in _placed(config, layout, uses):
        sizes = formats(config, segment, home)
        optim = _elements(segment, home.optim.sharded)
        if segment.trainable and home.optim.tier is Tier.NVME:
            read += optim * sizes.optim
            written += optim * sizes.optim
        if is_floating(segment) and home.params.tier is Tier.NVME:
            params = _elements(segment, home.params.sharded) * sizes.param
            read += params * use.whole
            written += params * segment.trainable
        if segment.trainable and home.grads.tier is Tier.NVME:
            # Read to be added to or stepped, written to wait; a unit that is stepped in backward
            # takes its last sum from memory.
            early = steps_in_backward(config) and home.params.sharded
            passes = use.reduced - early
            read += segment.shard_size * sizes.grad * passes
            written += segment.shard_size * sizes.grad * passes
    return {"read": read, "written": written}


def _placed(
    config: Config, layout: Layout, uses: Sequence[UnitUse]
) -> list[tuple[UnitUse, Segment, StatePlacement]]:
    """Uses of the unit, segment and placement of everything in ``layout``."""
    pairs = (
        (use, segment)
        for unit, use in zip(layout.units, uses, strict=True)
        for segment in unit.segments
    )
    return [(u, s, home) for (u, s), home in zip(pairs, homes(config, layout), strict=True)]


def _elements(segment: Segment, sharded: bool) -> int:
    return segment.shard_size if sharded else segment.size
