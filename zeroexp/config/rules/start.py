"""Rules about this machine: files, devices and packages that a run needs when it starts here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from zeroexp.config import hardware
from zeroexp.config.rules.rule import START, Rule
from zeroexp.config.tree import Config

# Logger to the packages of which one must be installed, and what installs it.
_LOGGER_PACKAGES = {
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"),
    "wandb": (("wandb",), "'zeroexp[wandb]'"),
    "mlflow": (("mlflow",), "'zeroexp[mlflow]'"),
}


def _installed(kind: str) -> bool:
    packages, _ = _LOGGER_PACKAGES.get(kind, ((), ""))
    return not packages or any(importlib.util.find_spec(name) is not None for name in packages)


def _data_fault(c: Config) -> str | None:
    """What is wrong with data.path, or None."""
    if c.data.kind not in ("text", "memmap") or c.data.path is None:
        return None
    path = Path(c.data.path).expanduser()
    if not path.exists():
        return f"{path} does not exist."
    if path.is_file() and path.stat().st_size == 0:
        return f"{path} is empty."
    return None


def _resume_missing(c: Config) -> bool:
    resume = c.checkpoint.resume
    return resume not in (None, "auto") and not Path(str(resume)).expanduser().exists()


def _logger_installed(kind: str) -> Rule:
    return Rule(
        key="logger.kinds",
        why=f"the {kind} logger is installed",
        reads=("logger.kinds",),
        broken=lambda c: kind in c.logger.kinds and not _installed(kind),
        problem=lambda c: f"{kind} is not installed.",
        fix=lambda c: f"pip install {_LOGGER_PACKAGES[kind][1]}",
        scope=START,
    )


START_RULES: tuple[Rule, ...] = (
    Rule(
        key="data.path",
        why="the data exists",
        reads=("data.path", "data.kind"),
        broken=lambda c: _data_fault(c) is not None,
        problem=lambda c: _data_fault(c) or "",
        fix=lambda c: (
            f"Looked at {Path(c.data.path or '').expanduser().absolute()} from {Path.cwd()}"
        ),
        scope=START,
    ),
    Rule(
        key="checkpoint.resume",
        why="the checkpoint exists",
        reads=("checkpoint.resume",),
        broken=_resume_missing,
        problem=lambda c: f"{c.checkpoint.resume} does not exist.",
        fix=lambda c: (
            f"Looked at {Path(str(c.checkpoint.resume)).expanduser().absolute()} from "
            f"{Path.cwd()}; give a checkpoint, a run directory, or auto"
        ),
        scope=START,
    ),
    Rule(
        key="trainer.accelerator",
        why="trainer.accelerator=gpu needs a visible device",
        reads=("trainer.accelerator",),
        broken=lambda c: c.trainer.accelerator == "gpu" and not hardware.has_gpu(),
        problem=lambda c: "gpu: no NVIDIA device is visible.",
        fix=lambda c: "Use trainer.accelerator=cpu, or look at nvidia-smi and CUDA_VISIBLE_DEVICES",
        scope=START,
    ),
    Rule(
        key="trainer.num_nodes",
        why="launch=local starts ranks on this machine only",
        reads=("trainer.num_nodes", "launch.kind"),
        broken=lambda c: c.trainer.num_nodes > 1 and c.launch.kind == "local",
        problem=lambda c: f"{c.trainer.num_nodes} nodes cannot be started from this one.",
        fix=lambda c: (
            f"Start torchrun --nnodes {c.trainer.num_nodes} on every node, with launch=external"
        ),
        scope=START,
    ),
    *(_logger_installed(kind) for kind in _LOGGER_PACKAGES),
)
