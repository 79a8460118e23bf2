"""offload: the tier on which each kind of state lives between its uses."""

from __future__ import annotations

from dataclasses import dataclass, field

from zeroexp.config.setting import setting

OFFLOAD_TIERS = {
    "none": ("device", "device"),
    "cpu": ("cpu", "device"),
    "nvme": ("nvme", "device"),
    "cpu_params": ("cpu", "cpu"),
    "nvme_params": ("nvme", "nvme"),
}
"""Kind of offload to the tiers of optimizer state and parameters."""

TIERS = ("auto", "device", "cpu", "nvme")


@dataclass(frozen=True, slots=True)
class NvmeConfig:
    """Files that hold state, and the engine that moves them."""

    dir: str | None = setting(
        None,
        "folder of the swap files. Each rank makes a folder of its own in it and removes it at the "
        "end; what a dead run left there is removed at the next start. none: `swap` below "
        "`paths.runs`. Use a local disk.",
        changes="where swap files lie",
        digest=False,
    )
    engine: str = setting(
        "auto",
        "how files are read and written. io_uring, threads (pread and pwrite), or auto: io_uring "
        "where the kernel allows it. `zeroexp doctor DIR` measures both.",
        changes="I/O time; never the results",
        choices=("auto", "io_uring", "threads"),
    )
    queue_depth: int = setting(
        4,
        "blocks that io_uring keeps with the kernel.",
        changes="I/O time; never the results",
        minimum=1,
        maximum=4096,
    )
    block_size: int = setting(
        8 * 2**20,
        "largest single transfer. Bytes, or a string with a binary unit; a multiple of 4KiB.",
        changes="I/O time; never the results",
        unit="bytes",
        minimum=4096,
        maximum=2**30,
    )
    threads: int = setting(
        4,
        "threads of the engine `threads`.",
        changes="I/O time; never the results",
        minimum=1,
        maximum=4096,
    )
    checksum: bool = setting(
        True,
        "compare a checksum of all that is read with what was written. A changed or cut file is an "
        "error before it reaches a weight.",
        changes="a few percent of step time, and whether bad bytes are found",
    )


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """The tier on which each kind of state lives between its uses.

    Owned gradients of stages 2 and 3 go to host memory with the optimizer state, and to disk with
    the parameters.
    """

    kind: str = setting(
        "none",
        "where state is kept between uses. none: on the device; cpu and nvme: optimizer state in "
        "host memory or on disk; cpu_params and nvme_params: the parameters too.",
        changes="state bytes per tier, and what moves in a step; never the weights",
        choices=tuple(OFFLOAD_TIERS),
    )
    optim: str = setting(
        "auto",
        "tier of the optimizer state. auto: as `kind` says.",
        changes="state bytes per tier",
        choices=TIERS,
    )
    params: str = setting(
        "auto",
        "tier of the parameters between their uses. auto: as `kind` says.",
        changes="state bytes per tier",
        choices=TIERS,
    )
    fraction: float = setting(
        1.0,
        "part of the optimizer state that leaves the device. In whole segments, the largest first, "
        "as many as fit into it; `zeroexp plan` shows what that comes to.",
        changes="state bytes per tier",
        minimum=0,
        maximum=1,
    )
    step_in_backward: str = setting(
        "auto",
        "step a unit as soon as its gradients are complete, beside the rest of backward. auto: "
        "from stage 1 on, where the optimizer state is offloaded and nothing must be known of all "
        "gradients first (no clipping, no loss scale, one optimizer, no replicas, a step after "
        "every last micro-batch); true: refuse to start where it cannot be done; false: never.",
        changes="step time, and when gradients are freed; never the weights",
        choices=("auto", "true", "false"),
    )
    delayed_update: bool = setting(
        False,
        "step with the gradients of the step before. The step runs beside forward and backward, "
        "and weights are one step stale (ZeRO-Offload's delayed parameter update).",
        changes="the weights, and step time",
    )
    chunk: int = setting(
        8 * 2**20,
        "bytes of optimizer state that are read, stepped and written at a time. Bytes, or a string "
        "with a binary unit.",
        changes="host memory for streaming; never the results",
        unit="bytes",
        minimum=2**16,
    )
    nvme: NvmeConfig = field(default_factory=NvmeConfig)

    @property
    def optim_tier(self) -> str:
        """The tier of the optimizer state, ``auto`` resolved."""
        return OFFLOAD_TIERS[self.kind][0] if self.optim == "auto" else self.optim

    @property
    def params_tier(self) -> str:
        """The tier of the parameters between their uses, ``auto`` resolved."""
        return OFFLOAD_TIERS[self.kind][1] if self.params == "auto" else self.params

    @property
    def uses_files(self) -> bool:
        """Whether anything lives in swap files."""
        return "nvme" in (self.optim_tier, self.params_tier)
