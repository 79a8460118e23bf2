"""Optimizers, schedules, and how a torch optimizer is stepped over flat shards."""

from zeroexp.optim.build import build
from zeroexp.optim.schedules import schedule

__all__ = ["build", "schedule"]
