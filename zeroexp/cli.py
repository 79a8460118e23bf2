"""The command line: ``zeroexp COMMAND …``; ``python train.py …`` is ``zeroexp train …``."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from zeroexp import __version__
from zeroexp.errors import ZeroexpError

if TYPE_CHECKING:
    from zeroexp.plan.pipeline import PipelinePlan

USAGE = """\
zeroexp: experiments with models that do not fit

  python train.py KEY=VALUE ...      one run:   python train.py zero=stage3 trainer.devices=2
  python train.py -m KEY=A,B ...     a sweep:   python train.py -m zero=stage0,stage1,stage2,stage3
  python train.py sweep=NAME         a sweep that comes with zeroexp
  zeroexp plan KEY=VALUE ...         will it fit? state and traffic per rank; starts nothing
  zeroexp report [DIR ...]           a table over runs that exist
  zeroexp explain [KEY]              what a key or section means, its value and where it comes from
  zeroexp doctor [DIR]               versions, compiled ops, memory, and the disk below DIR (runs)

  -q, --quiet        print nothing while a run goes well
  --sweep-dir DIR    put the sweep there; started again, it skips the runs that are done
  --fail-fast        end the sweep with the first run that fails
  --timeline [FILE]  with plan: draw the pipeline's schedule, as text or into FILE.svg
"""


_LET_RANK_0_SPEAK_SECONDS = 10.0


class UsageError(ZeroexpError):
    """A command line that asks for what does not exist (exit code 2)."""

    exit_code = 2


@dataclass
class Flags:
    """The flags that are no configuration, and the words that are left."""

    quiet: bool = False
    fail_fast: bool = False
    sweep_dir: Path | None = None
    timeline: str | None = None
    """An SVG file, or `-` for text."""
    help: bool = False
    rest: list[str] = field(default_factory=list)


def read_flags(argv: Sequence[str]) -> Flags:
    """Take our own flags out of ``argv``; everything else is left to the configuration."""
    flags = Flags()
    words = deque(argv)
    while words:
        word = words.popleft()
        name, equals, value = word.partition("=")
        if word in ("-q", "--quiet"):
            flags.quiet = True
        elif word == "--fail-fast":
            flags.fail_fast = True
        elif word in ("-h", "--help"):
            flags.help = True
        elif name == "--sweep-dir":
            directory = value if equals else words.popleft() if words else ""
            if not directory:
                raise UsageError("--sweep-dir has no directory; wanted --sweep-dir DIR")
            flags.sweep_dir = Path(directory)
        elif name == "--timeline":
            # Text unless a file follows; KEY=VALUE and further flags are none.
            follows = bool(words) and (words[0] == "-" or words[0].endswith(".svg"))
            flags.timeline = value if equals else words.popleft() if follows else "-"
        else:
            flags.rest.append(word)
    return flags


def train(flags: Flags) -> int:
    """One run, or a sweep with ``-m`` or ``sweep=NAME``."""
    from zeroexp.config import compose, is_multirun

    if flags.timeline is not None:
        raise UsageError("--timeline is for zeroexp plan")
    if is_multirun(flags.rest):
        return sweep(flags)
    if flags.sweep_dir is not None or flags.fail_fast:
        raise UsageError("--sweep-dir and --fail-fast are for sweeps; add -m")
    composed = compose(flags.rest)
    if composed.config.launch.kind == "external":
        from zeroexp.run.external import run_external

        return run_external(composed, flags.rest, quiet=flags.quiet)
    from zeroexp.run import driver
    from zeroexp.run.launch import Interrupt

    # Caught before the run directory exists: what stands in it says how the run ended.
    with Interrupt() as interrupt:
        start = driver.prepare(composed, flags.rest)
        return driver.run(start, interrupt=interrupt, quiet=flags.quiet).exit_code


def sweep(flags: Flags) -> int:
    """All runs of a sweep, one after the other."""
    from zeroexp.run.environment import is_rank
    from zeroexp.run.sweep import run_sweep

    if is_rank(os.environ):
        raise UsageError(
            f"a sweep (-m) cannot run inside rank {os.environ['RANK']} of torchrun; start it "
            "without torchrun: a sweep starts the ranks of every run itself"
        )
    return run_sweep(
        flags.rest, directory=flags.sweep_dir, fail_fast=flags.fail_fast, quiet=flags.quiet
    )


def plan(flags: Flags) -> int:
    """Print what a run would hold and send; exit code 1 when it cannot fit."""
    from zeroexp.config import compose
    from zeroexp.report.plan_page import plan_page
    from zeroexp.run.forecast import forecast

    if flags.timeline not in (None, "-") and not flags.timeline.endswith(".svg"):
        raise UsageError(f"--timeline {flags.timeline}: wanted FILE.svg, or nothing for text")
    config = compose(flags.rest, start=False).config.resolved()
    made = forecast(config)
    page = plan_page(config, made)
    if flags.timeline is not None:
        page += "\n\n" + _timeline(flags.timeline, None if made is None else made.pipeline)
    print(page)
    return 1 if made is not None and made.fits is False else 0


def _timeline(where: str, pipeline: PipelinePlan | None) -> str:
    """The timeline as text, or where it was written."""
    from zeroexp.pipeline.timeline_svg import timeline_svg
    from zeroexp.pipeline.timeline_text import timeline_text

    if pipeline is None:
        raise UsageError(
            "--timeline has nothing to draw: there is no pipeline, or its model is known to its "
            "ranks only. Use pipeline=1f1b with a built-in model and trainer.devices=2"
        )
    if where == "-":
        return timeline_text(pipeline.simulation, shutil.get_terminal_size((100, 0)).columns)
    try:
        Path(where).write_text(timeline_svg(pipeline.simulation), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--timeline {where}: {error.strerror}") from None
    return f"timeline: {where}"


def report(flags: Flags) -> int:
    """A table over the runs below the given directories (default: runs)."""
    from zeroexp.report.row import rows_below
    from zeroexp.report.table import text_table

    paths = [Path(word) for word in flags.rest] or [Path("runs")]
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise UsageError(f"there is no {missing[0]} (working directory {Path.cwd()})")
    rows = rows_below(paths)
    if not rows:
        raise UsageError(f"no runs in {', '.join(map(str, paths))}")
    print(text_table(rows))
    for row in rows:
        print(f"run {row.index}: {row.directory}")
    return 0


def explain(flags: Flags) -> int:
    """What keys mean; with overrides behind the key also what they make of it."""
    from zeroexp.config import compose
    from zeroexp.config import explain as explained
    from zeroexp.config.tree import SECTIONS

    names = [word for word in flags.rest if "=" not in word]
    composed = compose([word for word in flags.rest if "=" in word], start=False)
    if not names:
        print("sections: " + " ".join(SECTIONS) + "\nzeroexp explain SECTION lists its keys")
    for name in names:
        print(explained(name, composed))
    return 0


def doctor(flags: Flags) -> int:
    """What this machine, this installation and a directory (default: that of the runs) offer."""
    from zeroexp.report.doctor import examine

    if len(flags.rest) > 1:
        raise UsageError(f"doctor probes one directory, not {' '.join(flags.rest)}")
    directory = Path(flags.rest[0]) if flags.rest else None
    if directory is not None and not directory.is_dir():
        raise UsageError(f"there is no directory {directory} (working directory {Path.cwd()})")
    print(examine(directory))
    return 0


def convert(flags: Flags) -> int:
    """Refused by name until it exists."""
    raise UsageError(
        "convert arrives with sharded checkpoints; what checkpoint=full writes, torch.load and "
        "every Lightning strategy read"
    )


COMMANDS: dict[str, Callable[[Flags], int]] = {
    "train": train,
    "sweep": sweep,
    "plan": plan,
    "report": report,
    "explain": explain,
    "doctor": doctor,
    "convert": convert,
}


def _complain(error: Exception) -> None:
    """One message on stderr; what every rank of torchrun finds wrong alike, rank 0 says."""
    from zeroexp.run.environment import is_rank

    is_alike = getattr(error, "exit_code", 2) == 2
    if is_alike and is_rank(os.environ) and os.environ["RANK"] != "0":
        # The launcher ends all ranks when the first one does; that is to be rank 0, once it has
        # spoken.
        time.sleep(_LET_RANK_0_SPEAK_SECONDS)
    else:
        print(f"zeroexp: {error}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; what is wrong is one message on stderr. Returns the exit code.

    0 ok, 1 a run failed, 2 something is wrong with the configuration, 130 Ctrl-C. ``argv`` is what
    follows ``train.py``, where no word at all is a run as configured; without it this is the
    command ``zeroexp``, which then says what it can do.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and not words:
        print(USAGE, end="", file=sys.stderr)
        return 2
    try:
        if words == ["--version"]:
            print(f"zeroexp {__version__}")
            return 0
        command = COMMANDS[words.pop(0)] if words and words[0] in COMMANDS else train
        flags = read_flags(words)
        if flags.help:
            print(USAGE, end="")
            return 0
        return command(flags)
    except ZeroexpError as error:
        _complain(error)
        return error.exit_code
    except FileNotFoundError as error:
        _complain(error)
        return 2
    except KeyboardInterrupt:
        print("zeroexp: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; nothing can be said to it any more.
        sys.stderr.close()
        return 141


if __name__ == "__main__":
    sys.exit(main())
