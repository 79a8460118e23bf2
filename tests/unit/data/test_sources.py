"""Sources of tokens: what is in them, how they split, and how they refuse."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from zeroexp.data.sources.python_library import open_library
from zeroexp.data.sources.source import Source, Split
from zeroexp.data.sources.synthetic import NUM_TOKENS, SyntheticTokens
from zeroexp.data.sources.text import TextFiles, open_text
from zeroexp.data.sources.token_files import open_token_files
from zeroexp.errors import ConfigError


def whole(source: Source, split: Split) -> bytes:
    return bytes(source.read(split, 0, source.num_tokens(split)).astype(np.uint8))


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    return root


def test_folder_is_split_by_the_hash_of_each_name(tmp_path: Path) -> None:
    files = {f"part{i % 7}/file{i}.txt": f"text number {i}".encode() for i in range(60)}
    source = open_text(str(write(tmp_path, files)), 0.3)

    def belongs_to_val(name: str) -> bool:  # the rule of the documentation, written out
        return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) < 0.3 * 2**64

    splits: list[tuple[Split, bool]] = [("train", False), ("val", True)]
    for split, in_val in splits:
        names = sorted(n for n in files if belongs_to_val(n) == in_val)
        assert len(names) > 5
        assert whole(source, split) == b"".join(files[n] + b"\0" for n in names)


def test_other_files_do_not_move_a_file_to_the_other_split(tmp_path: Path) -> None:
    files = {f"{i}.txt": b"x%d" % i for i in range(40)}
    before = open_text(str(write(tmp_path, files)), 0.3)
    assert isinstance(before, TextFiles)
    val = {f.name for f in before.files("val")}
    for i in range(0, 40, 2):
        (tmp_path / f"{i}.txt").unlink()
    after = open_text(str(tmp_path), 0.3)
    assert isinstance(after, TextFiles)
    assert {f.name for f in after.files("val")} == {n for n in val if int(n[:-4]) % 2}


def test_one_file_is_split_at_its_tail(tmp_path: Path) -> None:
    text = os.urandom(1000)
    path = tmp_path / "a.txt"
    path.write_bytes(text)
    source = open_text(str(path), 0.1)
    assert whole(source, "train") == text[:900]
    assert whole(source, "val") == text[900:]
    assert source.num_ids == 256


def test_few_files_are_split_at_the_tail_of_all_bytes(tmp_path: Path) -> None:
    source = open_text(str(write(tmp_path, {"a": b"a" * 9, "b": b"b" * 9})), 1e-9)
    assert source.num_tokens("val") == 0  # 1e-9 of 20 bytes rounds to none
    source = open_text(str(tmp_path), 0.0)
    assert whole(source, "train") == b"a" * 9 + b"\0" + b"b" * 9 + b"\0"
    only = write(tmp_path / "only", {"c": b"0123456789" * 10})
    source = open_text(str(only), 0.25)
    joined = b"0123456789" * 10 + b"\0"
    assert (whole(source, "train"), whole(source, "val")) == (joined[:76], joined[76:])


def test_hidden_and_empty_files_stay_out(tmp_path: Path) -> None:
    write(tmp_path, {".git/config": b"no", "a/.hidden": b"no", "empty": b"", "a/text": b"yes"})
    assert whole(open_text(str(tmp_path), 0.0), "train") == b"yes\0"


def test_library_is_the_same_text_every_time_and_real() -> None:
    one, two = open_library(0.05), open_library(0.05)
    assert one.num_tokens("train") > 3_000_000
    assert 0.005 < one.num_tokens("val") / one.num_tokens("train") < 0.2
    assert whole(one, "val") == whole(two, "val")
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [f.relative_to(root) for f in one.files("train") + one.files("val")]
    assert Path("argparse.py") in names
    assert not [n for n in names if {"test", "site-packages"} & set(n.parts)]
    assert not set(one.files("train")) & set(one.files("val"))
    argparse = (root / "argparse.py").read_bytes()
    assert argparse in whole(one, "train") + b"|" + whole(one, "val")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_raw_token_file(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(100).astype(dtype)
    tokens.tofile(tmp_path / "t.bin")
    source = open_token_files(str(tmp_path / "t.bin"), dtype, 0.2)
    assert (source.num_tokens("train"), source.num_tokens("val")) == (80, 20)
    assert source.read("train", 10, 5).tolist() == [10, 11, 12, 13, 14]
    assert source.read("val", 0, 20).tolist() == list(range(80, 100))
    assert source.read("val", 0, 1).dtype == np.int64


def test_npy_file_knows_its_own_dtype(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(70000, 70010, dtype=np.uint32))
    source = open_token_files(str(tmp_path / "t.npy"), "uint16", 0.0)
    assert source.read("train", 0, 10).tolist() == list(range(70000, 70010))


def test_folder_with_train_and_val(tmp_path: Path) -> None:
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(10, 14, dtype=np.uint16).tofile(tmp_path / "val.bin")
    source = open_token_files(str(tmp_path), "uint16", 0.5)
    assert source.read("train", 0, 10).tolist() == list(range(10))
    assert source.read("val", 0, 4).tolist() == [10, 11, 12, 13]


def test_synthetic_tokens_are_a_function_of_seed_and_position() -> None:
    a, b = SyntheticTokens(97, 5, 0.1), SyntheticTokens(97, 5, 0.1)
    tokens = a.read("train", 1000, 500)
    assert tokens.tolist() == b.read("train", 0, 1500)[1000:].tolist()
    assert a.num_tokens("train") + a.num_tokens("val") == NUM_TOKENS
    other = SyntheticTokens(97, 6, 0.1).read("train", 1000, 500)
    assert (tokens == other).mean() < 0.1
    assert tokens.min() >= 0 and tokens.max() < 97
    # every second token is the one before plus a constant
    pairs = tokens.reshape(-1, 2)
    assert len(set(((pairs[:, 1] - pairs[:, 0]) % 97).tolist())) == 1
    # and the first of each pair is uniform: chi-square over 97 values, 99.9th percentile of 96 dof
    first = a.read("train", 0, 200_000)[::2]
    counts = np.bincount(first, minlength=97)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 144.6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: open_text(None, 0.1), r"data\.path .*not set.*data\.path=PATH"),
        (lambda p: open_text(str(p / "no"), 0.1), r"does not exist \(looked for /.*no\)"),
        (lambda p: open_text(str(p / "empty.txt"), 0.1), r"empty\.txt' is empty"),
        (lambda p: open_text(str(p / "folder"), 0.1), r"holds no file with text"),
        (lambda p: open_token_files(str(p / "a.txt"), "uint16", 0.1), r"neither in \.bin nor in"),
        (lambda p: open_token_files(str(p / "empty.bin"), "uint16", 0.1), r"empty\.bin' is empty"),
        (lambda p: open_token_files(str(p / "odd.bin"), "uint16", 0.1), r"data\.dtype .*3 bytes"),
        (lambda p: open_token_files(str(p / "folder"), "uint16", 0.1), r"neither train\.bin nor"),
        (lambda p: open_token_files(str(p / "bad.npy"), "uint16", 0.1), r"not a readable \.npy"),
        (lambda p: open_token_files(str(p / "float.npy"), "uint16", 0.1), r"float64 of shape"),
        (lambda p: open_token_files(str(p / "odd.bin"), "float32", 0.1), r"'float32' is no token"),
    ],
)
def test_what_cannot_be_read_is_said_with_key_and_fix(
    tmp_path: Path, make: object, message: str
) -> None:
    write(tmp_path, {"empty.txt": b"", "a.txt": b"x", "empty.bin": b"", "odd.bin": b"123"})
    (tmp_path / "bad.npy").write_bytes(b"not numpy")
    np.save(tmp_path / "float.npy", np.zeros(3))
    (tmp_path / "folder").mkdir()
    assert callable(make)
    with pytest.raises(ConfigError, match=message) as caught:
        make(tmp_path)
    assert all(p.key and p.problem and p.fix for p in caught.value.problems)
