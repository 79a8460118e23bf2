"""optim: the optimizer and its hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """The optimizer that train.py builds. A model=external may bring its own instead."""

    kind: str = setting(
        "adamw",
        "optimizer. All but rmsprop, which is torch's, step fp32 shards on the CPU by a compiled "
        "kernel.",
        changes="the update rule and the state bytes per parameter",
        choices=("adamw", "adam", "sgd", "lion", "adagrad", "rmsprop"),
    )
    lr: float = setting(
        3e-4,
        "learning rate. The peak of the schedule.",
        changes="the size of every update",
        minimum=0,
    )
    betas: tuple[float, float] = setting(
        (0.9, 0.95),
        "decay of the first and second moment. For lion: of the update and of the momentum.",
        changes="how long gradients are remembered",
        minimum=0,
        below=1,
        kinds=("adamw", "adam", "lion"),
    )
    eps: float = setting(
        1e-8,
        "term added to the denominator.",
        changes="updates of parameters with tiny gradients",
        minimum=0,
        kinds=("adamw", "adam", "adagrad", "rmsprop"),
    )
    weight_decay: float = setting(
        0.1,
        "weight decay. Decoupled from the gradient for adamw and lion, added to the gradient for "
        "the others.",
        changes="how weights shrink",
        minimum=0,
    )
    momentum: float = setting(
        0.0,
        "momentum factor. 0 keeps no momentum buffer.",
        changes="the update, and 4 bytes of state per parameter above 0",
        minimum=0,
        below=1,
        kinds=("sgd", "rmsprop"),
    )
    decay_norm_and_bias: bool = setting(
        False,
        "apply weight decay to norms and biases too. false puts parameters with one dimension, "
        "and the stacked biases of experts, into a group without decay.",
        changes="the number of parameter groups, and the decay of norms and biases",
    )

    def decays(self, name: str, dims: int) -> bool:
        """Whether the parameter ``name`` of ``dims`` dimensions is in the group with decay."""
        return self.decay_norm_and_bias or (dims > 1 and not name.endswith("bias"))
