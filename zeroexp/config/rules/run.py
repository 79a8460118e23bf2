"""Rules of steps, schedules, data and launch."""

from __future__ import annotations

from zeroexp.config.rules.rule import Rule
from zeroexp.config.tree import KEYS, Config

_FALLING = KEYS["schedule.total_steps"].meta.kinds


def _schedule_end(c: Config) -> int | None:
    end = c.schedule.total_steps
    return end if end is not None else (c.trainer.max_steps if c.trainer.max_steps > 0 else None)


RUN_RULES: tuple[Rule, ...] = (
    Rule(
        key="trainer.max_steps",
        why="a run ends",
        reads=("trainer.max_steps", "trainer.max_epochs"),
        broken=lambda c: (
            c.trainer.max_steps == 0 or (c.trainer.max_steps < 0 and c.trainer.max_epochs is None)
        ),
        problem=lambda c: (
            "0 steps train nothing." if c.trainer.max_steps == 0 else "-1 sets no end."
        ),
        fix=lambda c: (
            "Use at least 1"
            if c.trainer.max_steps == 0
            else "Give trainer.max_epochs or a number of steps"
        ),
    ),
    Rule(
        key="trainer.val_every",
        why="a validation has batches",
        reads=("trainer.val_every", "trainer.val_batches", "data.val_fraction"),
        broken=lambda c: (
            c.trainer.val_every is not None
            and (c.trainer.val_batches == 0 or c.data.val_fraction == 0)
        ),
        problem=lambda c: (
            "does nothing with trainer.val_batches=0."
            if c.trainer.val_batches == 0
            else "does nothing with data.val_fraction=0."
        ),
        fix=lambda c: "Give it something to validate on, or leave the key out",
    ),
    Rule(
        key="schedule.total_steps",
        why="a schedule that falls needs to know where it ends",
        reads=("schedule.total_steps", "schedule.kind", "trainer.max_steps"),
        broken=lambda c: c.schedule.kind in _FALLING and _schedule_end(c) is None,
        problem=lambda c: f"{c.schedule.kind} has no end with max_steps=-1.",
        fix=lambda c: "Give schedule.total_steps",
    ),
    Rule(
        key="schedule.warmup_steps",
        why="the warm-up ends before the schedule does",
        reads=(
            "schedule.warmup_steps",
            "schedule.total_steps",
            "schedule.kind",
            "trainer.max_steps",
        ),
        broken=lambda c: (
            c.schedule.kind in _FALLING
            and c.schedule.kind != "one_cycle"
            and c.schedule.warmup_steps >= (_schedule_end(c) or c.schedule.warmup_steps + 1)
        ),
        problem=lambda c: (
            f"{c.schedule.warmup_steps} leave no step of {_schedule_end(c)} for {c.schedule.kind}."
        ),
        fix=lambda c: f"Use less than {_schedule_end(c)}",
    ),
    Rule(
        key="schedule.warmup_steps",
        why="one_cycle goes up and comes down again before the schedule ends",
        reads=(
            "schedule.warmup_steps",
            "schedule.total_steps",
            "schedule.kind",
            "trainer.max_steps",
        ),
        broken=lambda c: (
            c.schedule.kind == "one_cycle"
            and 2 * c.schedule.warmup_steps > (_schedule_end(c) or 2 * c.schedule.warmup_steps)
        ),
        problem=lambda c: (
            f"{c.schedule.warmup_steps} up and {c.schedule.warmup_steps} down do not fit into "
            f"{_schedule_end(c)} steps."
        ),
        fix=lambda c: f"Use at most {(_schedule_end(c) or 0) // 2}",
    ),
    Rule(
        key="data.path",
        why="data=text and data=memmap read a path",
        reads=("data.path", "data.kind"),
        broken=lambda c: c.data.kind in ("text", "memmap") and c.data.path is None,
        problem=lambda c: f"is missing for data={c.data.kind}.",
        fix=lambda c: (
            "Give a file or folder of text" if c.data.kind == "text" else "Give a file of token ids"
        ),
    ),
    Rule(
        key="launch.retries",
        why="ranks that were started elsewhere cannot be started again from here",
        reads=("launch.retries", "launch.kind"),
        broken=lambda c: c.launch.kind == "external" and c.launch.retries > 0,
        problem=lambda c: "does nothing with launch=external.",
        fix=lambda c: "Use torchrun's --max-restarts",
    ),
)
