"""Collectives with a deadline, a fixed order of additions, and a ledger."""

from zeroexp.comm.group import Group, Pending
from zeroexp.comm.world import World

__all__ = ["Group", "Pending", "World"]
