"""From the raw samples of an offload result to its table and targets. Pure arithmetic, no torch.

The limit of a step that streams its state is the larger of what the same step takes with its state
in memory and what the disk needs for the bytes: nothing is gained by moving them faster than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.modes import OFFLOADED
from benchmarks.summary import LOSS_TOLERANCE, Spread, WorkResult
from benchmarks.targets import Verdict, shown, step_time

IN_MEMORY = "zx3"
PEERS: Mapping[str, tuple[str, ...]] = {
    "zx3": ("ds3",),
    "zx3-cpu": ("ds3-cpu",),
    "zx3-nvme": ("ds3-nvme", "ds3-nvme-pipelined"),
    "zx3-nvme-clipped": ("ds3-nvme", "ds3-nvme-pipelined"),
}
"""The modes of a peer that do what a mode does: the fastest of them counts."""

COLUMNS = (
    "mode",
    "step s",
    "to memory",
    "to its peer",
    "to its limit",
    "read MB",
    "written MB",
    "disk s",
    "tensors B",
    "peak B",
    "steady B",
    "loss",
)
HEADER = (f"| {' | '.join(COLUMNS)} |", "|-" * len(COLUMNS) + "|")


class OffloadResult:
    """``file``: a result file of kind ``offload``."""

    def __init__(self, file: Mapping[str, Any]) -> None:
        self.work = WorkResult(file["work"])
        self._modes: Mapping[str, Any] = file["work"]["modes"]
        self._disk: Mapping[str, Any] = file["disk"]

    def bytes_per_step(self, name: str) -> tuple[float, float] | None:
        """(read, written) by all ranks, by the kernel's count, mean over all rounds; None where the
        mode did not run or the kernel does not count."""
        rounds = self._bytes_by_round(name)
        if rounds is None:
            return None
        read, written = (sum(column) / len(rounds) for column in zip(*rounds, strict=True))
        return read, written

    def disk_seconds(self, name: str) -> Spread | None:
        """What the disk needs for the bytes of a step, at the rate of the same round."""
        seconds = self._disk_by_round(name)
        return None if seconds is None else Spread.of(seconds)

    def to_limit(self, name: str) -> Spread | None:
        """Step time over its limit, round by round."""
        steps, disk = self._steps_by_round(name), self._disk_by_round(name)
        memory = self._steps_by_round(IN_MEMORY)
        if steps is None or memory is None or disk is None:
            return None
        return Spread.of([s / max(m, d) for s, m, d in zip(steps, memory, disk, strict=True)])

    def fastest_peer(self, name: str) -> str | None:
        """Of the modes that do the same: the one with the least median; None if none ran."""
        times = {peer: self.work.step_seconds(peer) for peer in PEERS.get(name, ())}
        ran = {peer: spread.median for peer, spread in times.items() if spread is not None}
        return min(ran, key=ran.__getitem__) if ran else None

    def rates(self) -> dict[str, Spread] | None:
        """Bytes per second of all ranks' processes together by kind; None where they could not be
        measured."""
        rounds = self._disk["rounds"]
        if not rounds:
            return None
        return {kind: Spread.of([found[kind] for found in rounds]) for kind in rounds[0]}

    @property
    def reason(self) -> str | None:
        """Why there are no rates."""
        reason: str | None = self._disk["reason"]
        return reason

    def _bytes_by_round(self, name: str) -> list[tuple[float, float]] | None:
        if self.work.mode(name) is None:
            return None
        rounds = self._modes[name]["disk"]
        if not rounds or any(rank is None for ranks in rounds for rank in ranks):
            return None
        return [(sum(r for r, _ in ranks), sum(w for _, w in ranks)) for ranks in rounds]

    def _disk_by_round(self, name: str) -> list[float] | None:
        moved, rates = self._bytes_by_round(name), self._disk["rounds"]
        if moved is None or not rates:
            return None
        return [seconds_for(*pair, found) for pair, found in zip(moved, rates, strict=True)]

    def _steps_by_round(self, name: str) -> list[float] | None:
        found = self.work.mode(name)
        if found is None:
            return None
        return [median(map(max, zip(*ranks, strict=True))) for ranks in found["rounds"]]


def seconds_for(read: float, written: float, rates: Mapping[str, float]) -> float:
    """As much as is both read and written goes at the mixed rate, the rest at its own."""
    both = min(read, written)
    rest = (read - both) / rates["read"] + (written - both) / rates["write"]
    return 2 * both / rates["mixed"] + rest


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def row(result: OffloadResult, mode: str) -> str:
    """One mode as a table row; ``missing`` and the reason where it did not run."""
    label = f"{OFFLOADED[mode].label} (`{mode}`)"
    work = result.work
    step = work.step_seconds(mode)
    if step is None:
        reason = " ".join(work.reason(mode).split())
        return f"| {label} | missing: {reason} |" + " |" * (len(COLUMNS) - 2)
    memory = "zx3" if mode.startswith("zx3") else "ds3"
    peer = result.fastest_peer(mode)
    ratio = work.ratio(mode, peer) if peer else None
    moved = result.bytes_per_step(mode)
    disk = result.disk_seconds(mode)
    difference = work.loss_difference(mode, IN_MEMORY)
    ours = mode.startswith(IN_MEMORY)
    limit = result.to_limit(mode) if ours and OFFLOADED[mode].disk else None
    cells = [
        label,
        f"{step.median:.3f} ({step.low:.3f}..{step.high:.3f})",
        "" if mode == memory else _ratio(work.ratio(mode, memory)),
        f"{shown(ratio)} of `{peer}`" if ratio else "",
        _ratio(limit),
        _number(moved[0] / 1e6 if moved else None, 0),
        _number(moved[1] / 1e6 if moved else None, 0),
        _number(disk.median if disk else None, 3),
        _number(work.bytes_per_param(mode, "tensors"), 2),
        _number(work.peak_bytes_per_param(mode), 2),
        _number(work.peak_bytes_per_param(mode, steady=True), 2),
        "" if difference is None else f"{difference:.0e}",
    ]
    return "| " + " | ".join(cells) + " |"


def _ratio(value: Spread | None) -> str:
    return "" if value is None else shown(value)


def rows(result: OffloadResult) -> list[str]:
    """The table, and a line about the disk."""
    rates = result.rates()
    if rates is None:
        disk = f"missing: {result.reason}"
    else:
        disk = ", ".join(
            f"{kind} {rate.median / 1e9:.2f} ({rate.low / 1e9:.2f}..{rate.high / 1e9:.2f})"
            for kind, rate in rates.items()
        )
    return [
        *HEADER,
        *(row(result, mode) for mode in OFFLOADED),
        "",
        f"The disk, a bare io_uring loop in every rank's place at once, GB/s together: {disk}.",
    ]


def targets(result: OffloadResult | None) -> list[Verdict]:
    """What offloading may cost, on gpt125 with two ranks."""
    works = {} if result is None else {result.work.name: result.work}
    return [
        _limit(result, "zx3-nvme", 1.15),
        _peer(result, "zx3-nvme", 0.55),
        step_time(works, "gpt125", "zx3-cpu", IN_MEMORY, 1.03),
        _peer(result, "zx3-cpu", 0.7),
        _peak(result, "zx3-nvme", 10.5),
    ]


def _limit(result: OffloadResult | None, mode: str, at_most: float) -> Verdict:
    text = (
        f"gpt125: step time of {mode} at most {at_most:g}x of max(step of {IN_MEMORY}, bytes / "
        "disk rate)"
    )
    ratio = result.to_limit(mode) if result else None
    if ratio is None:
        return Verdict(text, None, False)
    return Verdict(text, shown(ratio), ratio.median <= at_most)


def _peer(result: OffloadResult | None, mode: str, at_most: float) -> Verdict:
    text = f"gpt125: step time of {mode} at most {at_most:g}x of {' or '.join(PEERS[mode])}"
    peer = result.fastest_peer(mode) if result else None
    ratio = result.work.ratio(mode, peer) if result and peer else None
    if result is None or peer is None or ratio is None:
        return Verdict(text, None, False)
    difference = result.work.loss_difference(mode, peer)
    if difference is None or difference > LOSS_TOLERANCE:
        return Verdict(text, f"losses differ by {difference:.1e}", False)
    return Verdict(text, f"{shown(ratio)} of {peer}", ratio.median <= at_most)


def _peak(result: OffloadResult | None, mode: str, at_most: float) -> Verdict:
    text = f"gpt125: peak memory of {mode} at most {at_most:g} B per parameter and rank"
    found = result.work.peak_bytes_per_param(mode) if result else None
    measured = None if found is None else f"{found:.2f} B"
    return Verdict(text, measured, found is not None and found <= at_most)
