"""From a configuration to batches: targets, checks, ranks, resuming."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zeroexp.config import Config
from zeroexp.data.dataset import Batch, TokenSequences
from zeroexp.data.loader import Loaders, TrainLoader
from zeroexp.data.plan import num_sequences, problems
from zeroexp.data.sampler import PADDING
from zeroexp.data.sources.token_files import open_token_files
from zeroexp.errors import ConfigError
from zeroexp.models.loss import IGNORED


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    """A token file that holds 0, 1, 2, … 199."""
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "t.bin")
    return tmp_path / "t.bin"


def config(path: Path, **keys: Any) -> Config:
    dotted = {
        "data.kind": "memmap",
        "data.path": str(path),
        "model.kind": "mlp",
        "data.seq_len": 4,
        "data.batch_size": 8,
        "data.val_fraction": 0.1,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    return Config.from_mapping(dotted)


def starts(batches: Any) -> list[list[int]]:
    """First token of every sequence, batch by batch."""
    return [batch["tokens"][:, 0].tolist() for batch in batches]


def test_target_is_the_next_token_and_no_token_is_lost(counting: Path) -> None:
    loader = Loaders(config(counting)).train()
    seen: list[int] = []
    for batch in loader:
        assert batch["tokens"].dtype == batch["targets"].dtype == torch.int64
        assert batch["tokens"].shape == batch["targets"].shape == (8, 4)
        assert torch.equal(batch["targets"], batch["tokens"] + 1)
        seen += batch["targets"].flatten().tolist()
    # 180 training tokens hold 44 sequences of 4 + 1 overlapping; 5 batches of 8 take 40 of them
    assert len(seen) == len(set(seen)) == 160
    assert set(seen) < set(range(1, 177))


@pytest.mark.parametrize(
    ("tokens", "seq_len", "expected"), [(0, 4, 0), (4, 4, 0), (5, 4, 1), (8, 4, 1), (9, 4, 2)]
)
def test_number_of_sequences(tokens: int, seq_len: int, expected: int) -> None:
    assert num_sequences(tokens, seq_len) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_step_are_the_same_for_any_cut(counting: Path, workers: int) -> None:
    alone = [sorted(s) for s in starts(Loaders(config(counting)).train())]
    for ranks, accumulate in ((2, 1), (2, 4), (4, 2), (1, 8)):
        keys = {"trainer__devices": ranks, "trainer__accumulate_grad_batches": accumulate}
        per_rank = [
            starts(Loaders(config(counting, data__workers=workers, **keys), data_rank=r).train())
            for r in range(ranks)
        ]
        steps = [
            sorted(
                itertools.chain.from_iterable(
                    micro for rank in per_rank for micro in rank[k * accumulate :][:accumulate]
                )
            )
            for k in range(len(alone))
        ]
        assert steps == alone


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_resumes_after_the_batch_it_gave_last(counting: Path, workers: int) -> None:
    def make() -> TrainLoader:
        return Loaders(config(counting, data__workers=workers)).train()

    straight = make()
    expected = starts(itertools.chain(straight, straight))  # two epochs of 5
    for stop in (0, 3, 5, 8):
        loader = make()
        given: list[list[int]] = []
        while len(given) < stop:
            given += starts(itertools.islice(loader, stop - len(given)))
        assert given == expected[:stop]
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        rest = starts(resumed)
        assert rest == expected[stop : stop + 5 - stop % 5]
    by_step = make()
    by_step.set_position(7)
    assert starts(by_step) == expected[7:]


def test_validation_reads_the_same_sequences_on_any_ranks(counting: Path) -> None:
    """20 validation tokens: 4 sequences. Ranks beyond them, and the tail, see padding."""
    for ranks in (1, 2, 4, 8):
        read: list[int] = []
        lengths = set()
        for rank in range(ranks):
            loader = Loaders(config(counting, trainer__devices=ranks), data_rank=rank).val()
            assert loader is not None
            batches = list(loader)
            lengths.add(len(batches))
            for batch in batches:
                kept = batch["targets"] != IGNORED
                assert torch.equal(kept.all(1), kept.any(1)), "a sequence counts whole or not"
                read += batch["tokens"][kept.all(1)][:, 0].tolist()
        assert sorted(read) == [180, 184, 188, 192]
        assert lengths == {1}


def test_validation_is_limited_in_sequences_not_in_batches_per_rank(tmp_path: Path) -> None:
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "t.bin")

    def count(ranks: int, accumulate: int) -> int:
        keys = {
            "trainer__devices": ranks,
            "trainer__accumulate_grad_batches": accumulate,
            "trainer__val_batches": 3,
            "data__val_fraction": 0.5,
            "model__vocab_size": 2000,
        }
        loaders = [
            Loaders(config(tmp_path / "t.bin", **keys), data_rank=r).val() for r in range(ranks)
        ]
        return sum(
            int((b["targets"] != IGNORED).all(1).sum())
            for loader in loaders
            if loader is not None
            for b in loader
        )

    assert {count(1, 1), count(2, 1), count(4, 2), count(1, 4)} == {3 * 8}


def test_without_validation_there_is_no_loader(counting: Path) -> None:
    assert Loaders(config(counting, data__val_fraction=0.0)).val() is None
    assert Loaders(config(counting, trainer__val_batches=0)).val() is None


def test_prediction_reads_everything(counting: Path) -> None:
    loader = Loaders(config(counting, data__val_fraction=0.0)).predict()
    kept = [b["tokens"][(b["targets"] != IGNORED).all(1)][:, 0].tolist() for b in loader]
    assert list(itertools.chain(*kept)) == list(range(0, 196, 4))


def test_padding_has_no_targets(counting: Path) -> None:
    data = TokenSequences(open_token_files(str(counting), "uint16", 0.0), "train", 4, 256)
    item = data[PADDING]
    assert item["tokens"].tolist() == [0] * 4
    assert item["targets"].tolist() == [IGNORED] * 4
    with pytest.raises(IndexError, match=r"sequence 49 outside 0\.\.48"):
        data[49]


def test_a_token_beyond_the_vocabulary_is_named_at_once(counting: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Loaders(config(counting, model__vocab_size=100)).train()
    (problem,) = caught.value.problems
    assert problem.key == "model.vocab_size"
    assert "token id 179 at position 179" in problem.problem
    assert "ids 0 to 99" in problem.problem
    assert "model.vocab_size=180" in problem.fix


def test_a_token_beyond_the_vocabulary_is_named_in_a_long_stream(
    counting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroexp.data.dataset._SCAN_TOKENS", 10)
    data = TokenSequences(open_token_files(str(counting), "uint16", 0.0), "train", 4, 150)
    assert data[36]["targets"].tolist() == [145, 146, 147, 148]
    with pytest.raises(ConfigError, match="token id 152 at position 152"):
        data[37]


def test_negative_token_ids_are_refused(tmp_path: Path) -> None:
    np.array([1, 2, -3, 4, 5, 6], dtype=np.int32).tofile(tmp_path / "t.bin")
    source = open_token_files(str(tmp_path / "t.bin"), "int32", 0.0)
    with pytest.raises(ConfigError, match=r"token id -3 at position 2 .*data\.dtype"):
        TokenSequences(source, "train", 2, 256)


@pytest.mark.parametrize(
    ("keys", "key", "problem", "fix"),
    [
        ({"data__path": "/no/such"}, "data.path", "does not exist", "exists"),
        ({"data__seq_len": 500}, "data.seq_len", "has 180 tokens", "data.seq_len=179"),
        ({"data__batch_size": 64}, "data.batch_size", "only 44", "data.batch_size=44"),
        (
            {"data__batch_size": 64, "trainer__devices": 64},
            "data.batch_size",
            "64 sequences per step over 64 ranks",
            "at most 44 ranks",
        ),
        (
            {"data__kind": "synthetic", "data__path": None, "data__seq_len": 20_000_000},
            "data.seq_len",
            "the training split of synthetic tokens has",
            "or less",
        ),
    ],
)
def test_problems_name_key_and_fix_before_anything_is_read(
    counting: Path, keys: dict[str, Any], key: str, problem: str, fix: str
) -> None:
    found = problems(config(counting, **keys))
    first = found[0]
    assert first.key == key
    assert problem in first.problem
    assert fix in first.fix
    with pytest.raises(ConfigError):
        Loaders(config(counting, **keys))


def test_bytes_need_256_ids() -> None:
    found = problems(Config.from_mapping({"model.kind": "mlp", "model.vocab_size": 100}))
    assert [p.key for p in found] == ["model.vocab_size"]
    assert "model.vocab_size=256" in found[0].fix


def test_problems_are_found_without_torch_and_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 50)
    code = (
        "import sys\n"
        "from zeroexp.config import Config\n"
        "from zeroexp.data.plan import problems\n"
        f"c = Config.from_mapping({{'data.kind': 'text', 'data.path': {str(tmp_path)!r},"
        " 'model.kind': 'mlp', 'model.vocab_size': 8, 'data.seq_len': 100})\n"
        "print([p.key for p in problems(c)], 'torch' in sys.modules)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "['model.vocab_size', 'data.seq_len', 'data.seq_len'] False"


def test_the_default_configuration_reads_the_library() -> None:
    default = Config.from_mapping({})
    assert problems(default) == []
    loaders = Loaders(default)
    train = next(iter(loaders.train()))
    val = loaders.val()
    assert val is not None
    for batch in (train, next(iter(val))):
        assert batch["tokens"].shape == (default.batch_size, default.data.seq_len)
        assert is_text(batch)


def is_text(batch: Batch) -> bool:
    tokens: Tensor = batch["tokens"]
    printable = ((tokens >= 32) & (tokens < 127)) | (tokens == 10) | (tokens == 0)
    return float(printable.float().mean()) > 0.98
