"""What a configuration will hold and send, by arithmetic alone: before a run, without torch."""

from zeroexp.plan.predict import Prediction, predict
from zeroexp.plan.table import zero_bytes

__all__ = ["Prediction", "predict", "zero_bytes"]
