"""The optimizer that the ``optim`` section describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from zeroexp.config.sections.optim import OptimConfig
from zeroexp.errors import ModelError
from zeroexp.optim.adagrad import Adagrad
from zeroexp.optim.adamw import AdamW
from zeroexp.optim.lion import Lion
from zeroexp.optim.sgd import SGD

Groups = list[dict[str, Any]]

_BUILDERS: Mapping[str, Callable[[Groups, OptimConfig], Optimizer]] = {
    "adamw": lambda groups, c: AdamW(groups, lr=c.lr, betas=c.betas, eps=c.eps),
    "adam": lambda groups, c: AdamW(groups, lr=c.lr, betas=c.betas, eps=c.eps, decoupled=False),
    "sgd": lambda groups, c: SGD(groups, lr=c.lr, momentum=c.momentum),
    "lion": lambda groups, c: Lion(groups, lr=c.lr, betas=c.betas),
    "adagrad": lambda groups, c: Adagrad(groups, lr=c.lr, eps=c.eps),
    "rmsprop": lambda groups, c: optim.RMSprop(groups, lr=c.lr, eps=c.eps, momentum=c.momentum),
}


def build(config: OptimConfig, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """An optimizer over the trainable parameters.

    Norms and biases form a group without weight decay, unless ``decay_norm_and_bias``: what has
    one dimension, and what is called a bias (those of experts are stacked). Raises
    :class:`ModelError` when nothing is trainable.
    """
    trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
    if not trainable:
        raise ModelError(
            "the model has no trainable parameter: every requires_grad is False. Unfreeze at "
            "least one."
        )
    matrices = [p for name, p in trainable if config.decays(name, p.dim())]
    vectors = [p for name, p in trainable if not config.decays(name, p.dim())]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        if params
    ]
    return _BUILDERS[config.kind](groups, config)
