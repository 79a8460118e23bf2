"""From which checkpoint a run goes on: ``checkpoint.resume`` as one path, found without torch."""

from __future__ import annotations

import re
from pathlib import Path

from zeroexp.config import Config
from zeroexp.errors import ConfigError, Problem
from zeroexp.run.atomic import read_json
from zeroexp.run.directory import RunDirectory, safe_name

_NAME = re.compile(r"step-(\d+)\.ckpt")


def checkpoint_name(step: int) -> str:
    """``step-00000120.ckpt``: names sort by step."""
    return f"step-{step:08d}.ckpt"


def checkpoints_in(folder: Path) -> list[Path]:
    """Whole checkpoints in ``folder``, the newest last; one that was being written is not among
    them.
    """
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


def digest_without_resume(config: Config) -> str:
    """What a run computes, wherever it was started from: the digest as if it began anew."""
    return config.updated({"checkpoint.resume": None}).digest()


def find(config: Config) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` means, or None for a fresh start.

    ``auto`` is the newest checkpoint of the newest run with this name and configuration, and a
    fresh start where there is none. Raises :class:`ConfigError` for a run directory without a whole
    checkpoint.
    """
    wanted = config.checkpoint.resume
    if wanted is None:
        return None
    if wanted == "auto":
        return _newest_of(config)
    path = Path(wanted).expanduser()
    if path.is_file():
        return path.absolute()
    found = checkpoints_in(RunDirectory(path).checkpoints) or checkpoints_in(path)
    if not found:
        raise ConfigError(
            [
                Problem(
                    "checkpoint.resume",
                    f"{path} holds no whole checkpoint.",
                    "Give a checkpoint, or a run directory with checkpoints/step-<n>.ckpt",
                )
            ]
        )
    return found[-1].absolute()


def _newest_of(config: Config) -> Path | None:
    parent = Path(config.paths.runs).expanduser() / safe_name(config.name)
    digest = digest_without_resume(config)
    for run in sorted(parent.iterdir(), reverse=True) if parent.is_dir() else []:
        directory = RunDirectory(run)
        described = read_json(directory.run)
        if described is not None and described.get("resume_digest") == digest:
            found = checkpoints_in(directory.checkpoints)
            if found:
                return found[-1].absolute()
    return None
