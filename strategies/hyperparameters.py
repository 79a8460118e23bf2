"""Hyper-parameters in a checkpoint: plain values, which any program can read without pickle."""

from __future__ import annotations

import warnings
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

_OWNERS = ("", "datamodule_")


def made_plain(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """``checkpoint`` with what ``save_hyperparameters`` left in it as plain containers.

    Hydra's containers become dicts and lists, their interpolations resolved where they can be.
    Modules are left out with a warning: their weights are in the checkpoint already. Anything else
    stays as it is.
    """
    made = dict(checkpoint)
    for owner in _OWNERS:
        key = f"{owner}hyper_parameters"
        if key not in made:
            continue
        values = _plain(made[key])
        modules = [name for name, value in values.items() if isinstance(value, nn.Module)]
        if modules:
            warnings.warn(
                f"hyper-parameters that are modules are not saved: {', '.join(modules)}. Leave "
                f"them out with save_hyperparameters(ignore={modules}) and pass them to "
                "load_from_checkpoint().",
                stacklevel=2,
            )
        made[key] = {name: value for name, value in values.items() if name not in modules}
        made.pop(f"{owner}hparams_type", None)  # the class of the container that it was
    return made


def _plain(value: Any) -> Any:
    if OmegaConf.is_config(value):
        try:
            return OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException:  # a value that only the program itself can resolve
            return OmegaConf.to_container(value, resolve=False)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value
