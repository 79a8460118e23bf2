"""The key reference is current and complete and explain agrees with it. (What each key
changes: tests/unit/test_key_effects.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroexp.config import Composed, Config, compose, explain
from zeroexp.config.reference import main, reference
from zeroexp.config.tree import KEYS, SECTIONS
from zeroexp.config.value import plain, show
from zeroexp.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def composed() -> Composed:
    return compose(["zero=stage3", "optim.lr=0.5"], environ={})


def rows() -> dict[str, list[str]]:
    """Rows of the key tables in the committed file: key to its cells."""
    found = {}
    for line in (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.replace("\\|", "¦").strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`"):
            found[cells[0].replace(" °", "").strip("`")] = cells
    return found


def test_the_committed_file_is_current() -> None:
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == reference(), "run: python -m zeroexp.config.reference docs/configuration.md"


def test_the_generator_writes_what_it_returns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "a.md")]) == 0
    assert (tmp_path / "a.md").read_text(encoding="utf-8") == reference()
    assert main([]) == 0
    assert capsys.readouterr().out == reference()


def test_every_key_is_documented_with_its_default_and_what_it_changes() -> None:
    table = rows()
    assert set(table) == set(KEYS)
    for path, (_, default, meaning, changes) in table.items():
        assert default == f"`{show(plain(Config().get(path)), KEYS[path])}`"
        assert len(meaning) > 20 and len(changes) > 5


def test_docs_are_sentences() -> None:
    for key in KEYS.values():
        assert key.meta.doc.endswith((".", ")")), key.path
        assert not key.meta.changes.endswith("."), key.path
        assert len(key.meta.phrase) < 80, key.path


@pytest.mark.parametrize("path", sorted(KEYS))
def test_explain_tells_type_default_effect_value_and_origin(path: str, composed: Composed) -> None:
    text = " ".join(explain(path, composed).split())
    key = KEYS[path]
    assert text.startswith(f"{path}: {key.meta.doc}")
    assert f"default {show(plain(key.default), key)}" in text
    assert f"changes {key.meta.changes}" in text
    assert f"({composed.origins[path]})" in text


def test_explain_shows_what_is_now_and_what_it_becomes_here(composed: Composed) -> None:
    assert "now 3 (conf/zero/stage3.yaml)" in " ".join(explain("zero.stage", composed).split())
    assert "now 0.5 (command line)" in " ".join(explain("optim.lr", composed).split())
    reduce = " ".join(explain("zero.reduce", composed).split())
    assert "now auto (default)" in reduce and "here each (on this machine)" in reduce
    assert "now" not in explain("optim.lr").split()


@pytest.mark.parametrize("section", [*SECTIONS, "precision.loss_scale"])
def test_explain_lists_the_keys_of_a_section(section: str) -> None:
    rows = [line for line in explain(section).splitlines()[1:] if line[2:3].strip()]
    listed = {line.split()[0] for line in rows}
    assert listed - {"options"} == {path for path in KEYS if path.startswith(f"{section}.")}


def test_explain_names_the_options_the_default_first() -> None:
    assert "options stage1 hybrid stage0 stage2 stage3" in " ".join(explain("zero").split())


def test_explain_of_groups_without_keys() -> None:
    experiment = " ".join(explain("experiment").split())
    assert "options none first_look gpt_small_stage3" in experiment
    sweep = " ".join(explain("sweep").split())
    assert "options none" in sweep and "zero_stages" in sweep


def test_explain_of_nothing_has_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean  zero\.stage "):
        explain("zero.stgae")
