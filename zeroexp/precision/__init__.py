"""Number formats of a run, and the loss scale that half precision needs."""

from zeroexp.precision.policy import Policy
from zeroexp.precision.scaler import LossScale

__all__ = ["LossScale", "Policy"]
