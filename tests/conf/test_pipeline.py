"""The pipeline's keys: what is on, what follows from what, and the messages of a command line."""

from __future__ import annotations

from typing import Any

import pytest

from zeroexp.config import Config, compose, parse_multirun
from zeroexp.config.sections.pipeline import SCHEDULES
from zeroexp.errors import ConfigError
from zeroexp.pipeline.schedules import RECIPES


def config(schedule: str = "1f1b", devices: int = 2, **keys: Any) -> Config:
    pipeline = {"schedule": schedule, **keys}
    return Config.from_mapping({"pipeline": pipeline, "trainer.devices": devices})


def test_every_schedule_has_a_name_and_no_name_is_without() -> None:
    assert set(SCHEDULES) == {*RECIPES, "auto"}
    for name in SCHEDULES:
        found = compose([f"pipeline={name}", "trainer.devices=2"], environ={}, start=False).config
        assert found.pipeline.schedule == name and found.pipeline.is_on
        assert Config.from_mapping({"pipeline": name, "trainer.devices": 2}) == found.updated(
            {"logger.kinds": Config().logger.kinds}
        )


def test_off_is_one_stage() -> None:
    for found in (Config(), config("none", stages=1), config("1f1b", stages=1, micro_batches=4)):
        assert not found.pipeline.is_on and found.pipeline.size == 1
        assert found.data_ranks == found.ranks and found.num_micro_batches == 1


def test_data_ranks_are_what_the_pipes_leave() -> None:
    found = config(devices=12, stages=3)
    assert (found.ranks, found.data_ranks, found.shard_size) == (12, 4, 4)
    assert found.micro_batch_size == 24 // 4
    node = Config.from_mapping(
        {
            "pipeline": {"schedule": "1f1b", "stages": 2},
            "trainer": {"devices": 4, "num_nodes": 2},
            "zero": {"stage": 3, "shard_size": "node"},
        }
    )
    assert (node.data_ranks, node.shard_size, node.resolved().zero.shard_size) == (4, 4, 4)


def test_stages_per_rank_are_what_the_schedule_needs() -> None:
    wanted = {"1f1b": 1, "gpipe": 1, "zb_h1": 1, "interleaved": 2, "breadth_first": 2, "zb_v": 2}
    for name, virtual in {**wanted, "dualpipe_v": 2, "auto": 4}.items():
        assert config(name).pipeline.num_virtual == virtual
        assert config(name).resolved().pipeline.virtual == virtual
        assert config(name).resolved().pipeline.stages == 2
    assert config("interleaved", virtual=3).resolved().pipeline.virtual == 3


@pytest.mark.parametrize(
    ("schedule", "stages", "samples", "parts"),
    [
        ("1f1b", 2, 24, 8),  # 4 x stages
        ("1f1b", 2, 12, 6),  # the most that divide, up to 8
        ("1f1b", 2, 7, 7),
        ("1f1b", 2, 11, 1),
        ("1f1b", 4, 64, 16),
        ("interleaved", 4, 24, 12),  # 12 is a multiple of 4, 8 and 4 are fewer
        ("interleaved", 4, 6, 1),  # none suits: the rules say so
        ("zb_h1", 4, 6, 6),
        ("auto", 2, 12, 6),
    ],
)
def test_the_number_of_micro_batches_follows_from_the_batch(
    schedule: str, stages: int, samples: int, parts: int
) -> None:
    pipeline = config(schedule, devices=stages, stages=stages).pipeline
    assert pipeline.num_micro_batches(samples) == parts
    asked = config(schedule, devices=stages, stages=stages, micro_batches=8).pipeline
    assert asked.num_micro_batches(samples) == 8


def test_what_is_resolved_can_be_read_again() -> None:
    for found in (config(), config("interleaved", cut=[1, 2, 2, 2]), config("none")):
        here = found.resolved()
        assert Config.from_mapping(here.to_dict()).resolved() == here == here.resolved()
        assert here.pipeline.micro_batches is None  # an engine sees its batch when it comes


def test_a_script_brings_a_model_of_its_own() -> None:
    assert config("interleaved", devices=8, stages=8, cut=[2] * 16).pipeline.size == 8
    compose(["model=gpt_small", "pipeline=interleaved", "pipeline.stages=4", "trainer.devices=4"])


def test_a_sweep_over_schedules() -> None:
    words = ["-m", "pipeline=none,1f1b,zb_v", "trainer.devices=2", "data.batch_size=8"]
    jobs = [compose(job, environ={}, start=False) for job in parse_multirun(words)]
    assert [job.config.pipeline.schedule for job in jobs] == ["none", "1f1b", "zb_v"]


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (
            ["pipeline=1f1b", "pipeline.micro_batches=5"],
            "pipeline.micro_batches",
            "5 parts of 24 sequences are not equal. Use 4 or 6, or data.batch_size=20 or 25.",
        ),
        (
            ["pipeline=interleaved", "trainer.devices=16"],
            "data.batch_size",
            "3 sequences per data rank make no number of micro-batches that interleaved takes. "
            "Use data.batch_size=16 or 32.",
        ),
        (["pipeline=1f1b", "pipeline.virtual=1", "pipeline.memory_limit=none"], None, ""),
        (["pipeline=none", "pipeline.virtual=none"], "pipeline.virtual", "pipeline.schedule=none"),
        (["pipeline.stages=2"], "pipeline.stages", "2 without a schedule."),
        (
            ["pipeline=interleaved", "pipeline.stages=4", "trainer.devices=4"],
            "pipeline.stages",
            "8 stages are more than the model's 7 layers. Use at most 7 (stages x virtual).",
        ),
        (
            ["pipeline=1f1b", "pipeline.cut=[3,3]"],
            "pipeline.cut",
            "[3, 3] has 6 layers, the model 7. Give 2 counts of 1 or more with the sum 7.",
        ),
        (["pipeline=1f1b", "pipeline.cut=[7]"], "pipeline.cut", "[7] cuts 1 stages, not 2."),
        (
            ["pipeline=auto", "pipeline.stages=8", "trainer.devices=8"],
            "pipeline.stages",
            "8 stages are more than the model's 7 layers.",
        ),
    ],
)
def test_messages_of_a_command_line(words: list[str], key: str | None, said: str) -> None:
    words = ["trainer.devices=2", *words] if "trainer.devices" not in "".join(words) else words
    if key is None:
        said = "does nothing with pipeline.schedule=1f1b"
        key = "pipeline.memory_limit"
    with pytest.raises(ConfigError) as caught:
        compose(words, environ={}, start=False)
    (problem,) = caught.value.problems
    assert problem.key == key and said in f"{problem.problem} {problem.fix}"


def test_a_batch_that_does_not_divide_over_the_data_ranks_is_the_only_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(
            {
                "pipeline": {"schedule": "1f1b", "micro_batches": 5},
                "trainer.devices": 4,
                "data.batch_size": 7,
            }
        )
    (problem,) = caught.value.problems
    assert (problem.key, problem.problem) == (
        "data.batch_size",
        "7 is not divisible by 2 data ranks.",
    )
