"""README and docs say what is true: every command in a code block runs as it stands, every shown
output is what comes out, every table of options lists those that exist.

Fences: ``bash`` holds commands, ``console`` commands with their output (a line ``…`` stands for any
lines), ``python`` scripts that are named in their first line, ``text`` samples with times in them.
The commands share one folder and run in the order of the pages, as a reader would type them.
"""

from __future__ import annotations

import csv
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from processes import CHECKOUT, environment

from zeroexp.config import compose, is_multirun, parse_multirun

# Seconds each; the limits are for machines that are busy with other things.
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

DOCS = CHECKOUT / "docs"
PAGES = [CHECKOUT / "README.md", *sorted(DOCS.glob("*.md"))]
#: its Python has tests of its own (tests/unit/strategies/test_docs.py)
TESTED_ELSEWHERE = {"lightning.md", "moe.md"}
PROGRAMS = "make|python|zeroexp|torchrun|bash"
FENCED_OR_INDENTED = rf"^```(\w*)\n((?s:.*?))^```$|((?:^    (?:{PROGRAMS}) .*\n)+)"
LIMIT = 500.0

#: Trains too long for a test, or needs what is not here: that it composes is checked in its place.
NOT_RUN = {
    "python train.py zero=stage3 trainer.devices=2": "100 steps; README runs 20 of them",
    "python train.py sweep=zero_stages": "400 steps",
    "python train.py -m zero=stage0,stage1,stage2,stage3": "400 steps",
    "python train.py sweep=zero_stages model=gpt_small precision=fp32 data.batch_size=2 "
    "data.seq_len=64 trainer.max_steps=6": "minutes; its results are committed",
    "python train.py zero=stage3 optim.lr=1e-3": "100 steps",
    "python train.py -m zero=stage0,stage3": "200 steps",
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
    "train.py launch=external zero=stage3": "needs two machines",
}


@dataclass(frozen=True)
class Block:
    """A code block of a page; ``kind`` is the word behind the fence."""

    page: str
    kind: str
    text: str


@dataclass(frozen=True)
class Step:
    """One command and, from a console block, the lines it prints."""

    page: str
    command: str
    output: tuple[str, ...] | None = None


def blocks() -> list[Block]:
    """Fenced blocks, and indented ones that hold commands, in the order of reading."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(FENCED_OR_INDENTED, text, re.M):
            kind, body, indented = match.groups()
            if indented is not None:
                kind, body = "bash", indented
            found.append(Block(page.name, kind, body))
    return found


def words_of(line: str) -> str:
    """A line without its comment, blanks as one."""
    return shlex.join(shlex.split(line, comments=True)) if line.strip() else ""


def steps() -> list[Step]:
    """All commands, each text once."""
    found: dict[str, Step] = {}
    for block in blocks():
        if block.kind == "bash":
            for line in block.text.splitlines():
                if command := words_of(line):
                    found.setdefault(command, Step(block.page, command))
        elif block.kind == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
                command, *output = part.rstrip().splitlines()
                found[words_of(command)] = Step(block.page, words_of(command), tuple(output))
    return list(found.values())


def scripts() -> dict[str, str]:
    """Named Python blocks outside of the pages that have tests of their own."""
    named: dict[str, str] = {}
    for block in blocks():
        if block.kind == "python" and block.page not in TESTED_ELSEWHERE:
            first = re.match(r"# (\w+\.py)\n", block.text)
            assert first is not None, f"{block.page}: a Python block without a name"
            assert first[1] not in named, f"{block.page}: a second {first[1]}"
            named[first[1]] = block.text
    return named


STEPS = steps()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Looks like the checkout to a reader, and keeps what the commands write out of it."""
    where = tmp_path_factory.mktemp("reader")
    for path in CHECKOUT.iterdir():
        if not path.name.startswith(".") and path.name not in ("runs", "build", "zeroexp"):
            (where / path.name).symlink_to(path)
    for name, text in scripts().items():
        (where / name).write_text(text)
    return where


def run(command: str, where: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    if words[0] == "python":
        words[0] = sys.executable
    elif words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    elif words[0] == "zeroexp":
        words[:1] = [sys.executable, "-m", "zeroexp"]
    # No terminal: messages are as wide as they like.
    return subprocess.run(
        words, cwd=where, env=environment(), capture_output=True, text=True, timeout=LIMIT
    )  # fmt: skip


def composes(command: str) -> None:
    """The words behind ``train.py`` are a configuration, or a sweep of configurations."""
    words = shlex.split(command.partition("train.py ")[2])
    lines = parse_multirun(words) if is_multirun(words) else [words]
    for line in lines:
        compose(line, start=False)


def check_make(command: str) -> None:
    """The target exists and ends in the command that it stands for."""
    # Not as a part of the make that runs the tests, whose flags, level and variables it hands down.
    handed_down = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "ARGS")
    outside = {k: v for k, v in os.environ.items() if k not in handed_down}
    done = subprocess.run(
        [*shlex.split(command), "-n"],
        cwd=CHECKOUT,
        env=outside,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    _, target, *variables = shlex.split(command)
    arguments = dict(v.split("=", 1) for v in variables).get("ARGS", "")
    if target == "train":
        assert last.endswith(f"bin/python train.py {arguments}")
        composes(last)
    else:
        assert last.rstrip().endswith(f"-m pytest -n 2 --dist loadfile {arguments}".rstrip())
        assert target == "test"


def matches(shown: tuple[str, ...], printed: str) -> bool:
    pattern = "".join(
        "(?:.*\n)*" if line.strip() == "…" else re.escape(line.rstrip()) + r"[ ]*\n"
        for line in shown
    )
    return re.fullmatch(pattern, printed.rstrip() + "\n") is not None


@pytest.mark.parametrize("step", STEPS, ids=[f"{s.page}: {s.command}"[:90] for s in STEPS])
def test_a_command_does_what_the_page_says(step: Step, folder: Path) -> None:
    if step.command.startswith("make "):
        check_make(step.command)
        return
    if step.command in NOT_RUN:
        composes(step.command)
        return
    done = run(step.command, folder)
    said = done.stdout + done.stderr
    wanted = (0,)
    if step.output is not None:
        assert matches(step.output, said), said
        wanted = (2,) if step.output[0].startswith("zeroexp: ") else (0, 1)
    elif step.command.startswith("zeroexp plan "):
        wanted = (0, 1)  # 1: it does not fit this machine
        assert "state bytes that stay on each rank" in said
    assert done.returncode in wanted, said


def test_nothing_is_listed_that_no_page_has() -> None:
    assert set(NOT_RUN) <= {step.command for step in STEPS}


def test_every_script_of_a_page_is_started_by_a_command() -> None:
    for name in scripts():
        assert any(name in step.command.split() for step in STEPS), name


README = PAGES[0].read_text(encoding="utf-8")


def table_rows(heading: str) -> list[list[str]]:
    """The cells of the table whose first heading is ``heading``."""
    body = README.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()[2:]]


def test_the_table_of_groups_has_every_group_and_every_option_default_first() -> None:
    conf = CHECKOUT / "conf"
    composed = yaml.safe_load((conf / "train.yaml").read_text())["defaults"]
    defaults = {k: v for entry in composed if isinstance(entry, dict) for k, v in entry.items()}
    shown: dict[str, list[str]] = {}
    for groups, options, _ in table_rows("group"):
        for group in re.findall(r"`(\w+)`", groups):
            shown[group] = re.findall(r"`(\w+)`", options)
    exist = {p.name for p in conf.iterdir() if p.is_dir() and list(p.glob("*.yaml"))}
    assert set(shown) == exist
    for group, options in shown.items():
        assert sorted(options) == sorted(path.stem for path in (conf / group).glob("*.yaml")), group
        assert options[0] == defaults[group], group


@pytest.mark.parametrize("row", table_rows("group"), ids=lambda row: row[0])
def test_the_example_of_a_group_composes(row: list[str]) -> None:
    examples = re.findall(r"`([^`]+=[^`]+)`", row[2])
    assert examples or "later" in row[2]
    for example in examples:
        config = compose(example.split(), start=False).config
        for word in example.split():
            key, _, value = word.partition("=")
            if "." in key:  # and the key took the value
                section, name = key.split(".")
                assert getattr(getattr(config, section), name) == yaml.safe_load(value)


def test_the_table_of_files_is_what_a_run_leaves(folder: Path) -> None:
    command = next(s.command for s in STEPS if "trainer.max_steps=20" in s.command)
    if not (folder / "runs" / "train").exists():  # this test was chosen alone
        run(command, folder)
    runs = sorted(folder.glob("runs/train/*/status.json"))
    exist = {path.name for path in runs[0].parent.iterdir()}
    named = {n.rstrip("/") for row in table_rows("file") for n in re.findall(r"`([^`]+)`", row[0])}
    assert exist - named == {"launch", "rank1.log"}
    assert named - exist == {"checkpoints"}  # checkpoint=none


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_picture_is_drawn_from_the_table_that_is_shown(tmp_path: Path) -> None:
    images = DOCS / "images"
    with (images / "zero_stages.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    # fp32 parameter, gradient and two moments; what a stage shards is halved over 2 ranks
    per_parameter = {"stage0": 16, "stage1": 12, "stage2": 10, "stage3": 8}
    assert [row["zero"] for row in rows] == list(per_parameter)
    for row in rows:
        parameters = int(rows[0]["params_bytes"]) // 4
        expected = per_parameter[row["zero"]] * parameters
        assert 0 <= int(row["state_bytes"]) - expected < 1e-4 * expected
        line = next(x for x in README.splitlines() if re.match(rf"\s*\d  {row['zero']} ", x))
        assert f"{float(row['loss_last']):.4f}" in line
        size = int(row["state_bytes"]) / 2**20
        assert f"{size:.2f} MiB" in line or f"{size / 1024:.2f} GiB" in line
    runpy.run_path(str(images / "zero_stages.py"))["main"](
        [str(images / "zero_stages.csv"), str(tmp_path / "new.png")]
    )
    assert (tmp_path / "new.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "new.png").stat().st_size > 10_000


def test_the_comparison_is_what_the_result_files_give() -> None:
    from benchmarks import readme, table

    between = README.partition(readme.BEGIN)[2].partition(readme.END)[0]
    results = CHECKOUT / "benchmarks" / "results"
    assert between.strip() == readme.section(table.read(results)).strip()
