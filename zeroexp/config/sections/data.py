"""data: what is read and how it is cut into batches."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Sequences of tokens, and how many of them make a step."""

    kind: str = setting(
        "stdlib",
        "source of tokens. stdlib: the text of Python's standard library as bytes; text: a file "
        "or folder as bytes; memmap: a file of token ids; synthetic: random tokens from the seed.",
        changes="what is trained on",
        choices=("stdlib", "text", "memmap", "synthetic"),
    )
    path: str | None = setting(
        None,
        "file or folder to read. Relative to where the command is started.",
        changes="what is trained on",
        kinds=("text", "memmap"),
    )
    seq_len: int = setting(
        128,
        "tokens per sequence.",
        changes="work and activation bytes per sequence",
        minimum=1,
        unit="tokens",
    )
    batch_size: int | None = setting(
        None,
        "sequences per optimizer step over all ranks. none: micro_batch_size x data ranks x "
        "accumulate_grad_batches where micro_batch_size is given, else 24.",
        changes="what one step sees; not how it is spread over ranks",
        minimum=1,
        unit="sequences",
    )
    micro_batch_size: int | None = setting(
        None,
        "sequences per rank in one forward pass. none: batch_size / (data ranks x "
        "accumulate_grad_batches), which must come out exactly.",
        changes="activation bytes; batch_size where that is not given",
        minimum=1,
        unit="sequences",
    )
    workers: int = setting(
        0,
        "processes per rank that prepare batches. 0 prepares them in the rank itself.",
        changes="step time where reading is slow; never the order of sequences",
        minimum=0,
        digest=False,
    )
    seed: int | None = setting(
        None,
        "seed of the order of sequences. none: trainer.seed.",
        changes="the shuffling of each epoch",
        minimum=0,
    )
    val_fraction: float = setting(
        0.05,
        "part of the data set aside for validation. 0 leaves nothing to validate on.",
        changes="the split into training and validation",
        minimum=0,
        below=1,
    )
    dtype: str = setting(
        "uint16",
        "type of one token id in the file.",
        changes="how the file is read",
        choices=("uint8", "uint16", "uint32", "int32", "int64"),
        kinds=("memmap",),
    )
