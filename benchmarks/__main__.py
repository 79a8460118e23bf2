"""``python -m benchmarks COMMAND``: measure, and turn committed results into docs/benchmarks.md and
the table in README.md."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import peer_env, readme, table, targets
from benchmarks.machine import ROOT, provenance
from benchmarks.modes import MODES, OFFLOADED, Mode
from benchmarks.timings import Timings
from benchmarks.training import Settings, compare
from benchmarks.work import WORKS

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"


def _say(line: str) -> None:
    print(line, flush=True)


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings(
        world_size=arguments.ranks,
        threads=arguments.threads,
        rounds=arguments.rounds,
        steps=arguments.steps,
    )


def _modes(arguments: argparse.Namespace, known: Mapping[str, Mode]) -> list[str]:
    """Those asked for, and the environment they need."""
    modes = arguments.modes.split(",") if arguments.modes else list(known)
    unknown = [mode for mode in modes if mode not in known]
    if unknown:
        raise SystemExit(f"unknown modes {', '.join(unknown)}; there are {', '.join(known)}")
    if any(known[mode].interpreter == "peers" for mode in modes) and not arguments.no_install:
        peer_env.make()
    return modes


def _train(arguments: argparse.Namespace, argv: list[str]) -> None:
    settings = _settings(arguments)
    modes = _modes(arguments, MODES)
    for work in arguments.work:
        result = provenance("training", argv)
        result["settings"] = dataclasses.asdict(settings)
        # Written after every round: a run that is ended early leaves what it has measured.
        for so_far in compare(work, modes, settings, _say):
            result["work"] = so_far
            _write(Path(arguments.out) / f"training-{work}.json", result)


def _offload(arguments: argparse.Namespace, argv: list[str]) -> None:
    from benchmarks import offload, offload_result

    settings = _settings(arguments)
    modes = _modes(arguments, OFFLOADED)
    for work in arguments.work:
        result = provenance("offload", argv) | {"settings": dataclasses.asdict(settings)}
        for so_far in offload.measure(work, modes, settings, _say, Path(arguments.dir)):
            result |= so_far
            _write(Path(arguments.out) / f"offload-{work}.json", result)
        found = offload_result.OffloadResult(result)
        verdicts = offload_result.targets(found) if work == "gpt125" else []
        _say("\n".join([*offload_result.rows(found), "", *table.target_rows(verdicts)]))


def _moe(arguments: argparse.Namespace, argv: list[str]) -> None:
    from benchmarks import moe, moe_result

    if not arguments.no_install:
        peer_env.make()
    result = provenance("moe", argv)
    for so_far in moe.measure(arguments.rounds, arguments.steps, _say):
        _write(Path(arguments.out) / "moe.json", result | so_far)
        timings = Timings(so_far)
    verdicts = moe_result.targets(timings)
    _say("\n".join([*moe_result.rows(timings), "", *table.target_rows(verdicts)]))


def _pipe(arguments: argparse.Namespace, argv: list[str]) -> None:
    from benchmarks import pipe, pipe_result

    if not arguments.no_install:
        peer_env.make()
    names = arguments.only.split(",") if arguments.only else list(pipe_result.VARIANTS)
    unknown = [name for name in names if name not in pipe_result.VARIANTS]
    if unknown:
        known = ", ".join(pipe_result.VARIANTS)
        raise SystemExit(f"unknown systems {', '.join(unknown)}; there are {known}")
    result = provenance("pipe", argv)
    for so_far in pipe.measure(arguments.rounds, arguments.steps, _say, names):
        _write(Path(arguments.out) / "pipe.json", result | so_far)
        timings = Timings(so_far)
    verdicts = pipe_result.targets(timings)
    _say("\n".join([*pipe_result.rows(timings), "", *table.target_rows(verdicts)]))


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    # An end by SIGTERM unwinds like Ctrl-C, so that the processes of all modes end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser("train", help="zeroexp and its peers side by side on the same work")
    offload = commands.add_parser("offload", help="the same with state on other tiers")
    for sides, known in ((train, MODES), (offload, OFFLOADED)):
        sides.add_argument("work", nargs="+", choices=list(WORKS))
        sides.add_argument("--modes", help=f"comma-separated, default all: {','.join(known)}")
        sides.add_argument("--ranks", type=int, default=Settings.world_size)
        sides.add_argument("--threads", type=int, default=Settings.threads, help="threads per rank")
        sides.add_argument("--rounds", type=int, default=Settings.rounds)
        sides.add_argument("--steps", type=int, default=Settings.steps, help="timed steps a round")
        sides.add_argument(
            "--no-install", action="store_true", help="do not make the peers' environment"
        )
        sides.add_argument("--out", default=str(RESULTS), help="folder for the result file")
    offload.add_argument("--dir", default=str(ROOT / "build"), help="folder on the disk to use")

    kernel = commands.add_parser(
        "kernel", help="the kernels beside torch's, AdamW beside its limit"
    )
    kernel.add_argument("--rounds", type=int, default=7)
    kernel.add_argument("--elements", type=int, default=100_000_000)
    kernel.add_argument("--out", default=str(RESULTS))

    overhead = commands.add_parser("overhead", help="zeroexp's Python in a step of 100 units")
    overhead.add_argument("--rounds", type=int, default=7)
    overhead.add_argument("--out", default=str(RESULTS))

    startup = commands.add_parser("startup", help="launch to first step, by launcher")
    startup.add_argument("--rounds", type=int, default=7)
    startup.add_argument("--out", default=str(RESULTS))

    compose = commands.add_parser("compose", help="command to answer, where no rank is needed")
    compose.add_argument("--rounds", type=int, default=11)
    compose.add_argument("--out", default=str(RESULTS))

    io = commands.add_parser("io", help="the file engine beside others")
    io.add_argument("--rounds", type=int, default=7)
    io.add_argument("--dir", default=str(ROOT / "build"), help="folder on the disk to measure")
    io.add_argument("--out", default=str(RESULTS))

    layers = commands.add_parser("moe", help="the MoE layer beside DeepSpeed's and a dense one")
    stages = commands.add_parser("pipe", help="the pipeline beside torch's and DeepSpeed's")
    stages.add_argument("--only", help="comma-separated systems by the names in the table")
    for parts in (layers, stages):
        parts.add_argument("--rounds", type=int, default=7)
        parts.add_argument("--steps", type=int, default=3, help="timed passes a round")
        parts.add_argument(
            "--no-install", action="store_true", help="do not make the peers' environment"
        )
        parts.add_argument("--out", default=str(RESULTS))

    commands.add_parser("peers", help="make the environment of the peers that need one")

    page = commands.add_parser("table", help="write docs/benchmarks.md and README's table")
    page.add_argument("--results", default=str(RESULTS))
    page.add_argument("--page", default=str(PAGE))
    page.add_argument("--readme", default=str(README))

    arguments = parser.parse_args(argv)
    if arguments.command == "train":
        _train(arguments, argv)
    elif arguments.command == "offload":
        _offload(arguments, argv)
    elif arguments.command == "moe":
        _moe(arguments, argv)
    elif arguments.command == "pipe":
        _pipe(arguments, argv)
    elif arguments.command == "kernel":
        from benchmarks import kernel as adamw

        result = provenance("kernel", argv) | adamw.measure(arguments.rounds, arguments.elements)
        _write(Path(arguments.out) / "kernel.json", result)
    elif arguments.command == "overhead":
        from benchmarks import overhead as engine_overhead

        result = provenance("overhead", argv) | engine_overhead.measure(arguments.rounds)
        _write(Path(arguments.out) / "overhead.json", result)
    elif arguments.command == "startup":
        from benchmarks import startup as launchers

        result = provenance("startup", argv) | launchers.measure(arguments.rounds)
        _write(Path(arguments.out) / "startup.json", result)
    elif arguments.command == "compose":
        from benchmarks import compose as answers

        result = provenance("compose", argv) | answers.measure(arguments.rounds)
        _write(Path(arguments.out) / "compose.json", result)
    elif arguments.command == "io":
        from benchmarks import io as files

        folder = Path(arguments.dir)
        folder.mkdir(parents=True, exist_ok=True)
        result = provenance("io", argv) | files.measure(arguments.rounds, folder)
        _write(Path(arguments.out) / "io.json", result)
        timings = Timings(result)
        verdicts = table.target_rows(targets.file_engine(timings))
        _say("\n".join([*timings.rows(), "", *verdicts]))
    elif arguments.command == "peers":
        peer_env.make()
    elif arguments.command == "table":
        table.write(Path(arguments.results), Path(arguments.page))
        readme.write(table.read(Path(arguments.results)), Path(arguments.readme))


if __name__ == "__main__":
    main()
