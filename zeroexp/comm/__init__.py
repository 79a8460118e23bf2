"""Collectives with a deadline, a fixed order of additions, and a ledger."""

from zeroexp.comm.group import DONE, Group, Pending
from zeroexp.comm.world import World

__all__ = ["DONE", "Group", "Pending", "World"]
