"""What is planned but not here: refused by name, so that nothing is accepted and ignored."""

from __future__ import annotations

PARALLEL = "tensor and sequence parallelism"
SHARDED = "the sharded checkpoint format"
HUGGING_FACE = "the Hugging Face models"

# Section (or group) to the capability that all its values but `none` wait for.
SECTIONS: dict[str, str] = {
    "tensor": PARALLEL,
    "tensor_parallel": PARALLEL,
    "sequence": PARALLEL,
    "sequence_parallel": PARALLEL,
    "parallel": PARALLEL,
}

# Single values of groups that otherwise exist.
OPTIONS: dict[tuple[str, str], str] = {
    ("checkpoint", "sharded"): SHARDED,
    ("model", "hf"): HUGGING_FACE,
    ("data", "hf"): HUGGING_FACE,
    ("recompute", "selective"): "selective recompute",
}


def arrives_with(section: str, value: object = None) -> str | None:
    """The capability that ``section`` (or this value of it) waits for, or None when it waits for "
    "nothing."""
    if section in SECTIONS and value != "none":
        return SECTIONS[section]
    return OPTIONS.get((section, value)) if isinstance(value, str) else None
