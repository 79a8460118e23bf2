"""Rules of the offload tiers."""

from __future__ import annotations

from zeroexp.config.byte_size import format_bytes
from zeroexp.config.rules.rule import ALWAYS, COMMAND, Rule, differs
from zeroexp.config.sections.offload import OFFLOAD_TIERS
from zeroexp.config.stepping import waits_for
from zeroexp.config.tree import Config

#: Direct I/O moves whole blocks of it, on every disk.
_BLOCK = 4096

_TIERS = ("offload.kind", "offload.optim", "offload.params")
_OPTIM = ("offload.kind", "offload.optim")
_RANKS = ("trainer.devices", "trainer.num_nodes")
_WAITS = (
    "precision.loss_scale.mode",
    "precision.nonfinite",
    "precision.compute",
)


def _is_overruled(c: Config) -> bool:
    """Whether ``kind`` names a tier, and both tiers are said to be others."""
    tier, _ = OFFLOAD_TIERS[c.offload.kind]
    return tier != "device" and tier not in (c.offload.optim_tier, c.offload.params_tier)


def _whole_blocks(path: str) -> Rule:
    def near(c: Config) -> str:
        size = int(c.get(path))
        return format_bytes(-(-size // _BLOCK) * _BLOCK)

    return Rule(
        key=path,
        why="direct I/O moves multiples of 4KiB",
        reads=(path,),
        broken=lambda c: c.get(path) % _BLOCK != 0,
        problem=lambda c: f"{c.get(path)} is not a multiple of 4KiB.",
        fix=lambda c: f"Use {path}={near(c)}",
    )


def _needs_engine(path: str, engine: str, other: str) -> Rule:
    return Rule(
        key=path,
        why=f"{path.rpartition('.')[2]} is of the engine {engine}",
        reads=(path, "offload.nvme.engine", *_TIERS),
        broken=lambda c: (
            c.offload.uses_files and c.offload.nvme.engine == other and differs(c, path)
        ),
        problem=lambda c: f"does nothing with offload.nvme.engine={other}.",
        fix=lambda c: f"Use offload.nvme.engine={engine}, or leave the key out",
    )


def _needs_optim(path: str, why: str) -> Rule:
    return Rule(
        key=path,
        why=why,
        reads=(path, *_OPTIM),
        broken=lambda c: c.offload.optim_tier == "device" and differs(c, path),
        problem=lambda c: "does nothing: the optimizer state stays on the device.",
        fix=lambda c: "Use offload=cpu or offload=nvme, or leave the key out",
    )


def _must_step(c: Config) -> bool:
    return c.offload.step_in_backward == "true" and c.offload.optim_tier != "device"


def _needs_all_gradients(given: bool) -> Rule:
    """A clip value that was written down counts anywhere; the default one only where a command line
    hands it to the Trainer."""
    clip = "trainer.gradient_clip_val"
    return Rule(
        key="offload.step_in_backward",
        why="clipping needs the norm of all gradients before the first unit is stepped",
        reads=("offload.step_in_backward", clip, *_OPTIM),
        broken=lambda c: (
            _must_step(c) and c.trainer.gradient_clip_val is not None and differs(c, clip) is given
        ),
        problem=lambda c: (
            f"true cannot be: clipping to {c.trainer.gradient_clip_val:g} needs all gradients."
        ),
        fix=lambda c: f"Use {clip}=none, or offload.step_in_backward=auto",
        scope=ALWAYS if given else COMMAND,
    )


OFFLOAD_RULES: tuple[Rule, ...] = (
    Rule(
        key="offload.kind",
        why="something is on the tier that kind names",
        reads=_TIERS,
        broken=_is_overruled,
        problem=lambda c: (
            f"{c.offload.kind} does nothing: the optimizer state is said to be on "
            f"{c.offload.optim_tier}, the parameters on {c.offload.params_tier}."
        ),
        fix=lambda c: "Use offload=none beside offload.optim and offload.params, or drop these",
    ),
    _whole_blocks("offload.nvme.block_size"),
    _needs_engine("offload.nvme.queue_depth", "io_uring", "threads"),
    _needs_engine("offload.nvme.threads", "threads", "io_uring"),
    _whole_blocks("offload.chunk"),
    _needs_optim("offload.fraction", "a fraction is of optimizer state that leaves the device"),
    _needs_optim(
        "offload.delayed_update", "a delayed update is one of optimizer state off the device"
    ),
    _needs_optim("offload.step_in_backward", "the step that backward hides is one off the device"),
    _needs_all_gradients(given=True),
    _needs_all_gradients(given=False),
    Rule(
        key="offload.step_in_backward",
        why="a loss scale and skipped steps need all gradients before the first unit is stepped",
        reads=("offload.step_in_backward", *_OPTIM, *_WAITS),
        broken=lambda c: _must_step(c) and waits_for(c, clips=False) is not None,
        problem=lambda c: (
            f"true cannot be: {waits_for(c, clips=False)} needs all gradients before any step."
        ),
        fix=lambda c: "Use offload.step_in_backward=auto, or fp32 or bf16 without skipped steps",
    ),
    Rule(
        key="offload.step_in_backward",
        why="gradients that all ranks step with are brought to all of them at the boundary",
        reads=("offload.step_in_backward", "zero.stage", "zero.shard_size", *_RANKS, *_OPTIM),
        broken=lambda c: _must_step(c) and (c.zero.stage == 0 or c.shard_size != c.data_ranks),
        problem=lambda c: (
            "true cannot be at stage 0."
            if c.zero.stage == 0
            else f"true cannot be with {c.data_ranks // c.shard_size} replicas of the state."
        ),
        fix=lambda c: (
            "Use zero=stage1, 2 or 3 over all data ranks, or offload.step_in_backward=auto"
        ),
    ),
    Rule(
        key="offload.step_in_backward",
        why="a delayed update steps beside the pass after its own",
        reads=("offload.step_in_backward", "offload.delayed_update", *_OPTIM),
        broken=lambda c: _must_step(c) and c.offload.delayed_update,
        problem=lambda c: "true cannot be together with offload.delayed_update.",
        fix=lambda c: "Use one of the two",
    ),
)
