"""What a configuration will read, found out before anything starts: no torch, no token is read."""

from __future__ import annotations

from zeroexp.config import Config
from zeroexp.data.sources.registry import open_source
from zeroexp.data.sources.source import Source, Split
from zeroexp.errors import ConfigError, Problem


def num_sequences(num_tokens: int, seq_len: int) -> int:
    """Sequences of ``seq_len`` tokens in a stream: each needs one token more, which may be the
    first of the next."""
    return max(0, (num_tokens - 1) // seq_len)


def problems(config: Config) -> list[Problem]:
    """Everything that would stop this configuration's data from being read, as messages.

    Looks at files and their sizes only, so it is quick on any amount of data; token ids are checked
    by the ranks. A model of your own (model=external) may bring its own data and is not checked
    against the vocabulary.
    """
    try:
        source = open_source(config)
    except ConfigError as error:
        return list(error.problems)
    found = list(_vocabulary(config, source))
    found += _split_problems(config, source, "train")
    if config.data.val_fraction > 0 and config.trainer.val_batches > 0:
        found += _split_problems(config, source, "val")
    return found


def _vocabulary(config: Config, source: Source) -> list[Problem]:
    model = config.model
    if source.num_ids is None or model.kind == "external" or model.vocab_size >= source.num_ids:
        return []
    return [
        Problem(
            "model.vocab_size",
            f"{model.vocab_size} is too few: {source.name} has ids 0 to {source.num_ids - 1}.",
            f"Use model.vocab_size={source.num_ids} or more",
        )
    ]


def _split_problems(config: Config, source: Source, split: Split) -> list[Problem]:
    seq_len, num_tokens = config.data.seq_len, source.num_tokens(split)
    have = num_sequences(num_tokens, seq_len)
    which = "training" if split == "train" else "validation"
    if have == 0:
        return [
            Problem(
                "data.seq_len",
                f"{seq_len} is too long: the {which} split of {source.name} has {num_tokens} "
                f"tokens, a sequence takes {seq_len + 1}.",
                f"Use data.seq_len={num_tokens - 1} or less, or more data"
                if num_tokens > 1
                else "Give more data"
                + (", or data.val_fraction=0 for no validation" if split == "val" else ""),
            )
        ]
    needed = config.batch_size
    if split == "train" and have < needed:
        ranks = config.data_ranks
        return [
            Problem(
                "data.batch_size",
                f"{needed} sequences per step over {ranks} ranks, but {source.name} has only "
                f"{have} of data.seq_len={seq_len}.",
                f"Use data.batch_size={have} or less, a smaller data.seq_len, or more data"
                if have >= ranks
                else f"Use at most {have} ranks, a smaller data.seq_len, or more data",
            )
        ]
    return []
