"""zero: who holds parameters, gradients and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass

from zeroexp.config.setting import setting


@dataclass(frozen=True, slots=True)
class ZeroConfig:
    """What is sharded over the data-parallel ranks, and in which pieces it moves."""

    stage: int = setting(
        1,
        "ZeRO stage 0-3. 0 replicates everything (as DDP does), 1 shards the optimizer state, 2 "
        "the gradients as well, 3 the parameters too.",
        changes="state bytes per rank and bytes on the wire; in fp32 over gloo never the weights",
        minimum=0,
        maximum=3,
    )
    shard_size: int | str | None = setting(
        None,
        "ranks that share one copy of the state. A number that divides the data ranks, `node` for "
        "the ranks of one node, or none for all data ranks. Stage 3 only; below the world size "
        "this is hybrid sharding (HSDP, MiCS).",
        changes="state bytes per rank, and which bytes cross nodes",
        words=("node",),
        minimum=1,
    )
    unit: str = setting(
        "block",
        "where the model is cut into units. `block`: the elements of the outermost ModuleList or "
        "Sequential are units and the rest is the root unit; `model`: one unit; `leaf`: every "
        "module with parameters of its own; otherwise glob patterns over module names, separated "
        "by commas (`encoder.layers.*,decoder.layers.*`).",
        changes="size and number of messages, padding, and the peak of gathered parameters",
    )
    prefetch: int = setting(
        1,
        "units gathered ahead of the one in use. Stage 3 with zero.overlap: the other stages have "
        "nothing to gather in a pass.",
        changes="the overlap of gathering with compute, and how many whole units are alive at once",
        minimum=0,
    )
    overlap: bool = setting(
        True,
        "run collectives beside compute. false waits for each one, which is easier to profile.",
        changes="step time only",
    )
    reshard_after_forward: str = setting(
        "true",
        "release a unit after its forward pass. true, false (keep it whole until backward), or "
        "auto (all but the root unit, which backward needs at once). Stage 3, and parameters off "
        "the device.",
        changes="peak bytes and the all-gather bytes of a step (3 or 2 times the model)",
        choices=("true", "false", "auto"),
    )
    reduce: str = setting(
        "auto",
        "when gradients of accumulated micro-batches are reduced. `each` micro-batch, only the "
        "`last`, or auto: each where gradients are sharded (stages 2 and 3), last elsewhere. The "
        "two add in different orders.",
        changes="reduce-scatter bytes per step, gradient bytes, and rounding within 1e-6",
        choices=("auto", "each", "last"),
    )
    bucket: int = setting(
        64 * 2**20,
        "largest message of one reduction. Bytes, or a string with a binary unit such as 64MiB.",
        changes="the number of messages and the peak of communication buffers; never the results",
        unit="bytes",
        minimum=64,
    )
