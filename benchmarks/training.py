"""The comparison itself: every mode takes a few steps in turn, round after round, on the same work.

Only one mode is active at a time, and a round compares steps that were taken within the same
minutes: memory bandwidth of a virtual machine drifts by a third over longer times, so only ratios
within a round mean anything. The order of the modes turns from round to round. Processes live
through all rounds as far as memory allows; a pair for which there is no room is started anew in
each round (which yields more samples of its start, and the same steps).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import peer_env
from benchmarks.machine import ROOT, memory_bytes
from benchmarks.modes import mode_named
from benchmarks.pair import Pair, PairFailed
from benchmarks.work import WORKS


@dataclass(frozen=True)
class Settings:
    """``steps`` timed steps a round after ``discard`` untimed ones (caches are cold when a pair
    takes its turn, and work that a system defers past its step must not fall out of the
    measurement); ``warmup`` steps after a start."""

    world_size: int = 2
    threads: int = 1
    rounds: int = 7
    steps: int = 3
    discard: int = 1
    warmup: int = 2
    memory_share: float = 0.55


class Entry:
    """One mode on one work: its processes while they live, and everything measured so far."""

    def __init__(self, work: str, mode: str, settings: Settings, disk: Path) -> None:
        self.work = work
        self.mode = mode_named(mode)
        self.settings = settings
        self.disk = disk
        self.pair: Pair | None = None
        self.reason: str | None = None
        self.resident_bytes = 0
        self.found: dict[str, Any] = {
            "launches": [],
            "rounds": [],
            "cpu_seconds": [],
            "losses": [],
            "disk": [],
            "memory": None,
            "versions": None,
            "notes": [],
        }

    def start(self) -> Pair:
        """Start the processes and take the first and the warm-up steps."""
        before = set(peer_env.builds())
        pair, first = self._launch()
        compiled = set(peer_env.builds()) - before
        if compiled:
            # The time to the first step was the compiler's: note it, and measure a start as every
            # later one is.
            seconds = max(reply["end"] for reply in first) - pair.launched
            names = ", ".join(sorted(compiled))
            self.found["notes"].append(
                f"compiled {names} on first use: first step after {seconds:.0f} s"
            )
            self.stop()
            pair, first = self._launch()
        warm = pair.ask("steps", count=self.settings.warmup)
        if not self.found["losses"]:
            losses = [a["losses"] + b["losses"] for a, b in zip(first, warm, strict=True)]
            self.found["losses"] = [sum(step) / len(step) for step in zip(*losses, strict=True)]
            self.found["versions"] = pair.ask("versions")[0]
        self.found["launches"].append(
            {
                "first_step_seconds": max(reply["end"] for reply in first) - pair.launched,
                "peak_rss": [reply["peak_rss"] for reply in warm],
            }
        )
        pair.ask("reset_peak")
        return pair

    def _launch(self) -> tuple[Pair, list[dict[str, Any]]]:
        settings = self.settings
        self.pair = Pair(
            ["benchmarks.worker", self.work, self.mode.name],
            self.mode.interpreter,
            settings.world_size,
            settings.threads,
            disk=self.disk,
        )
        return self.pair, self.pair.ask("steps", count=1, timeout=1800.0)  # a peer may compile here

    def turn(self, *, last: bool) -> None:
        """Take this round's steps. A failure makes the mode missing for the rest of the run."""
        if self.reason is not None:
            return
        try:
            pair = self.pair or self.start()
            replies = pair.ask("steps", count=self.settings.discard + self.settings.steps)
            self.found["rounds"].append(
                [reply["seconds"][self.settings.discard :] for reply in replies]
            )
            self.found["cpu_seconds"].append([reply["cpu_seconds"] for reply in replies])
            self.found["disk"].append([reply["disk"] for reply in replies])
            self.found["launches"][-1]["peak_rss_steady"] = [reply["peak_rss"] for reply in replies]
            self.resident_bytes = sum(reply["peak_rss"] for reply in replies)
            if last:
                self.found["memory"] = pair.ask("memory")
        except PairFailed as failure:
            self.reason = str(failure)
            self.stop()

    def stop(self) -> None:
        if self.pair is not None:
            self.pair.close()
            self.pair = None

    def result(self) -> dict[str, Any]:
        status = "ok" if self.reason is None else "missing"
        return {"status": status, "reason": self.reason, **self.found}


def compare(
    work: str,
    modes: Sequence[str],
    settings: Settings,
    say: Callable[[str], None],
    disk: Path = ROOT / "build",
) -> Iterator[dict[str, Any]]:
    """Run all rounds of all modes on one work; after each round yields the ``work`` part of a
    result file, all samples so far (bytes are counted in the last one). Modes that use a disk make
    their files below ``disk``."""
    entries = [Entry(work, mode, settings, disk) for mode in modes]
    if any(entry.mode.interpreter == "peers" for entry in entries) and not peer_env.exists():
        for entry in entries:
            if entry.mode.interpreter == "peers":
                entry.reason = "no environment for it: python -m benchmarks peers"
    budget = settings.memory_share * memory_bytes("MemAvailable")
    try:
        for round_index in range(settings.rounds):
            last = round_index == settings.rounds - 1
            shift = round_index % len(entries)
            for entry in entries[shift:] + entries[:shift]:
                entry.turn(last=last)
                resident = sum(other.resident_bytes for other in entries if other.pair is not None)
                if last or resident > budget:
                    entry.stop()
                if entry.reason is not None:
                    outcome = f"missing: {entry.reason}"
                else:
                    outcome = " ".join(
                        f"{max(step):.4f}" for step in zip(*entry.found["rounds"][-1], strict=True)
                    )
                say(
                    f"{work} round {round_index + 1}/{settings.rounds} {entry.mode.name}: {outcome}"
                )
            yield {
                "name": work,
                "title": WORKS[work].title,
                "num_params": WORKS[work].num_params,
                "modes": {entry.mode.name: entry.result() for entry in entries},
            }
    finally:
        for entry in entries:
            entry.stop()
