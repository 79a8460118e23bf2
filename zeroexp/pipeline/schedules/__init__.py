"""One file a schedule, ``(stages, micro_batches, virtual) -> actions per rank``; the registry."""

from zeroexp.pipeline.schedules.recipe import Recipe
from zeroexp.pipeline.schedules.registry import RECIPES, make_schedule

__all__ = ["RECIPES", "Recipe", "make_schedule"]
