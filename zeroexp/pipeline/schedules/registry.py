"""The schedules by name. A new one is a file of its own and an entry here."""

from __future__ import annotations

from zeroexp.errors import ConfigError, Problem
from zeroexp.pipeline.schedule import Schedule
from zeroexp.pipeline.schedules.breadth_first import breadth_first
from zeroexp.pipeline.schedules.dualpipe_v import dualpipe_v
from zeroexp.pipeline.schedules.gpipe import gpipe
from zeroexp.pipeline.schedules.interleaved import interleaved
from zeroexp.pipeline.schedules.one_f_one_b import one_f_one_b
from zeroexp.pipeline.schedules.recipe import Recipe
from zeroexp.pipeline.schedules.zb_h1 import zb_h1
from zeroexp.pipeline.schedules.zb_v import zb_v

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("1f1b", one_f_one_b, "arXiv:2006.09503"),
        Recipe("gpipe", gpipe, "arXiv:1811.06965"),
        Recipe(
            "interleaved",
            interleaved,
            "arXiv:2104.04473",
            virtual=(2, None),
            default=2,
            rounds=True,
        ),
        Recipe("breadth_first", breadth_first, "arXiv:2211.05953", virtual=(1, None), default=2),
        Recipe(
            "zb_h1",
            zb_h1,
            "arXiv:2401.10241",
            splits_backward=True,
            virtual=(1, None),
            rounds=True,
        ),
        Recipe(
            "zb_v",
            zb_v,
            "arXiv:2401.10241",
            splits_backward=True,
            virtual=(2, 2),
            default=2,
            v_shape=True,
        ),
        Recipe(
            "dualpipe_v",
            dualpipe_v,
            "arXiv:2412.19437",
            splits_backward=True,
            virtual=(2, 2),
            default=2,
            v_shape=True,
        ),
    )
}


def make_schedule(
    name: str, stages: int, micro_batches: int, virtual: int | None = None
) -> Schedule:
    """The compute actions of schedule ``name`` on ``stages`` ranks with ``virtual`` stages each.

    Raises :class:`ConfigError` (keys ``pipeline.*``) for an unknown name or numbers that do not
    fit, with the nearest that do.
    """
    if name not in RECIPES:
        known = " ".join(RECIPES)
        raise ConfigError([Problem("pipeline.schedule", f"no schedule {name}.", f"Use {known}")])
    return RECIPES[name].make(stages, micro_batches, virtual)
