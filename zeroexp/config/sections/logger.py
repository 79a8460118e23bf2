"""logger: where curves go."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting

LOGGERS = ("tensorboard", "jsonl", "csv", "wandb", "mlflow")


@dataclass(frozen=True, slots=True)
class LoggerConfig:
    """Loggers beside metrics.jsonl, which is always written."""

    kinds: tuple[str, ...] = setting(
        ("tensorboard",),
        "loggers in use. A list; jsonl stands for metrics.jsonl alone; wandb and mlflow are "
        "extras to install.",
        changes="which curves are written besides metrics.jsonl",
        choices=LOGGERS,
        digest=False,
    )
