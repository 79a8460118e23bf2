"""What runs a pipeline's lists: stages, their transfers, the executor.

A model becomes layers and layers become stages (:mod:`.split`, :mod:`.stage`); the executor runs a
rank's list (:mod:`.executor`) over a channel to the other ranks (:mod:`.channel`). Whoever holds a
stage's parameters, gradients and optimizer state stays outside: :class:`.owner.Owner` is told what
happens.
"""

from zeroexp.pipeline.runtime.channel import Channel
from zeroexp.pipeline.runtime.executor import Executor
from zeroexp.pipeline.runtime.micro_batches import Mapped, Parts, split_batch
from zeroexp.pipeline.runtime.owner import Owner
from zeroexp.pipeline.runtime.run import Result
from zeroexp.pipeline.runtime.split import layers_of, split
from zeroexp.pipeline.runtime.stage import Stage
from zeroexp.pipeline.runtime.ties import Ties

__all__ = [
    "Channel",
    "Executor",
    "Mapped",
    "Owner",
    "Parts",
    "Result",
    "Stage",
    "Ties",
    "layers_of",
    "split",
]
__all__ += ["split_batch"]
