"""Command lines: groups, values, origins, and every fault in one report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zeroexp.config import Composed, Config
from zeroexp.config import compose as compose_anywhere
from zeroexp.errors import ConfigError


def compose(*argv: str, **environ: str) -> Composed:
    return compose_anywhere(list(argv), environ=environ)


def problems(*argv: str, **environ: str) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        compose(*argv, **environ)
    return [(p.key, f"{p.problem} {p.fix}") for p in caught.value.problems]


def problem(*argv: str, **environ: str) -> tuple[str, str]:
    (only,) = problems(*argv, **environ)
    return only


# what is chosen
def test_no_words_are_the_typed_defaults() -> None:
    composed = compose()
    assert composed.config == Config()
    assert composed.overrides == []


def test_an_option_a_value_and_their_origins() -> None:
    """CF-05."""
    composed = compose("zero=stage3", "trainer.devices=2", "zero.bucket=1MiB", "optim=lion")
    config = composed.config
    assert (config.zero.stage, config.trainer.devices, config.zero.bucket) == (3, 2, 1048576)
    assert config.optim.betas == (0.9, 0.99)
    origins = composed.origins
    assert origins["zero.stage"] == "conf/zero/stage3.yaml"
    assert origins["optim.betas"] == "conf/optim/lion.yaml"
    assert origins["trainer.devices"] == origins["zero.bucket"] == "command line"
    assert origins["model.dim"] == "default"
    assert composed.choices["zero"] == "stage3"
    assert composed.choices["model"] == "gpt_tiny"
    assert composed.overrides == [
        "zero=stage3",
        "trainer.devices=2",
        "zero.bucket=1MiB",
        "optim=lion",
    ]


def test_the_command_line_wins_over_option_files_and_the_last_word_over_the_first() -> None:
    config = compose("optim.lr=1", "zero=stage2", "optim=lion", "zero=stage3", "optim.lr=2").config
    assert (config.optim.lr, config.zero.stage) == (2.0, 3)


def test_a_preset_wins_over_groups_and_loses_to_the_command_line() -> None:
    preset = compose("experiment=first_look")
    assert (preset.config.zero.stage, preset.config.trainer.devices) == (3, 2)
    assert preset.origins["trainer.devices"] == "conf/experiment/first_look.yaml"
    assert preset.origins["zero.stage"] == "conf/zero/stage3.yaml"
    assert preset.choices["zero"] == "stage3"
    changed = compose("experiment=first_look", "zero=stage1", "trainer.devices=4")
    assert (changed.config.zero.stage, changed.config.trainer.devices) == (1, 4)
    assert changed.config.schedule.kind == "warmup_cosine"


def test_values_are_taken_as_hydra_writes_them() -> None:
    config = compose(
        "optim.betas=[0.8,0.9]",
        "trainer.gradient_clip_val=null",
        "name='a, b'",
        "trainer.max_steps=2e2",
        "zero.reshard_after_forward=false",
        "model=external",
        "model.target=a.b:C",
        "+model.kwargs.depth=3",
        "model.kwargs.sizes=[1,2]",
    ).config
    assert config.optim.betas == (0.8, 0.9)
    assert config.trainer.gradient_clip_val is None
    assert config.name == "a, b"
    assert config.trainer.max_steps == 200
    assert config.zero.reshard_after_forward == "false"
    assert config.model.kwargs == {"depth": 3, "sizes": [1, 2]}


def test_a_section_may_be_given_as_a_mapping() -> None:
    composed = compose("optim={lr: 0.5, eps: 1}")
    assert (composed.config.optim.lr, composed.config.optim.eps) == (0.5, 1.0)
    assert composed.origins["optim.lr"] == "command line"


def test_one_key_may_refer_to_another() -> None:
    config = compose("model.hidden=${model.dim}", "model=gpt_small").config
    assert config.model.hidden == 768
    key, text = problem("model.hidden=${model.dmi}")
    assert key == "model.hidden"
    assert "refers to nothing" in text and "model.dmi" in text


# faults (HY-04, -05)
def test_the_message_of_the_design() -> None:
    with pytest.raises(ConfigError) as caught:
        compose("zero.stgae=3", "pipeline=1f1b", "pipeline.stages=4", "trainer.devices=6")
    assert str(caught.value).splitlines() == [
        "2 problems in the configuration",
        "  zero.stgae       no such key.               "
        "Did you mean  zero.stage  (ZeRO stage 0-3, default 1)?",
        "  pipeline.stages  4 does not divide 6 ranks.  "
        "6 ranks = replicate 1 x shard 1.5 x pipe 4; use 1, 2, 3 or 6.",
    ]
    assert caught.value.exit_code == 2


def test_a_mistyped_section() -> None:
    key, text = problem("optm.lr=1")
    assert key == "optm.lr"
    assert "no such section as optm" in text and "Did you mean  optim.lr " in text


def test_a_mistyped_key() -> None:
    key, text = problem("optim.lrr=1")
    assert key == "optim.lrr"
    assert "Did you mean  optim.lr " in text


def test_plus_on_a_key_that_exists() -> None:
    key, text = problem("+optim.lr=1")
    assert (key, text) == ("optim.lr", "already exists. Drop the +: optim.lr=1.")


def test_plus_plus_on_a_key_that_exists_sets_it() -> None:
    assert compose("++optim.lr=1").config.optim.lr == 1.0


@pytest.mark.parametrize("plus", ["+", "++"])
def test_a_key_smuggled_in_with_plus_is_refused(plus: str) -> None:
    key, text = problem(f"{plus}zero.stgae=3")
    assert key == "zero.stgae"
    assert f"no such key. {plus} adds no keys." in text and "zero.stage" in text
    assert "adds no keys" in problem(f"{plus}foo.bar=1")[1]


def test_removing_what_is_not_there() -> None:
    key, text = problem("~optim.x")
    assert key == "optim.x"
    assert "nothing to remove: no such key" in text


def test_removing_what_is_there() -> None:
    assert problem("~optim.lr") == (
        "optim.lr",
        "a key cannot be removed. To go back to the default write optim.lr=0.0003.",
    )
    key, text = problem("~checkpoint")
    assert key == "checkpoint"
    assert "a group cannot be removed. Off is checkpoint=none." in text


def test_a_typo_in_hydras_own_settings() -> None:
    """HY-05."""
    key, text = problem("hydra.ouput_subdir=x")
    assert key == "hydra.ouput_subdir"
    assert "no such key. Did you mean  hydra.output_subdir?" in text


@pytest.mark.parametrize(
    ("word", "key", "words"),
    [
        ("hydra.run.dir=x", "hydra.run.dir", "has no effect here. Use paths.runs"),
        ("hydra/launcher=joblib", "hydra/launcher", "has no effect here. zeroexp starts ranks"),
        ("zer=stage3", "zer", "no such group or key. Did you mean  zero=stage3?"),
        ("stage=3", "stage", "Did you mean  zero.stage "),
        ("zero=3", "zero", "3 is not an option. Did you mean  zero=stage3?"),
        ("optim=adamW", "optim", "Did you mean  optim=adamw?  Options: adagrad, adam, adamw,"),
        ("zero=null", "zero", "null is not an option. Options: hybrid, stage0,"),
        ("moe=null", "moe", "null is not an option. Off is moe=none."),
        ("offload=ssd", "offload", "ssd is not an option. Options: cpu, cpu_params, none, nvme,"),
        ("offload=nvme_param", "offload", "Did you mean  offload=nvme_params?"),
        ("offload=null", "offload", "null is not an option. Off is offload=none."),
        ("moe=top3", "moe", "top3 is not an option. Did you mean  moe=top"),
        ("pipeline=1f1", "pipeline", "1f1 is not an option. Did you mean  pipeline=1f1b?"),
        ("pipeline=null", "pipeline", "null is not an option. Off is pipeline=none."),
        (
            "recompute=selective",
            "recompute",
            "arrives with selective recompute. Options: full, none.",
        ),
        ("checkpoint=sharded", "checkpoint", "arrives with the sharded checkpoint format."),
        ("model=hf", "model", "hf arrives with the Hugging Face models. Options: external,"),
        ("data=hf", "data", "hf arrives with the Hugging Face models."),
        ("tensor=2", "tensor", "arrives with tensor and sequence parallelism."),
        ("sequence_parallel=2", "sequence_parallel", "arrives with tensor and sequence"),
        ("offload.path=/x", "offload.path", "Did you mean  offload.nvme.dir "),
        (
            "offload=nvme zero=stage3 offload.step_in_backward=true",
            "offload.step_in_backward",
            "clipping to 1 needs all gradients. Use trainer.gradient_clip_val=none",
        ),
        ("+zero=stage3", "zero", "is already there. Drop the +: zero=stage3."),
        ("zero@other=stage3", "zero", "packages are not used here. Write zero=OPTION."),
        ("schema/zero=zero", "schema/zero", "packages are not used here."),
        ("logger=[csv,tensorboard]", "logger", "Use logger.kinds=[csv, tensorboard]."),
        ("zero=[stage1,stage3]", "zero", "is a list. Choose one."),
        ("zero.stage=stage3", "zero.stage", "stage3 is a string. Wanted an integer from 0 to 3."),
        ("zero.stage", "zero.stage", "has no value. Wanted zero.stage=VALUE."),
        ("zero", "zero", "has no value. Wanted zero=OPTION."),
        ("zero.unit=[1", "zero.unit", "cannot be read"),
        ("optim.lr=", "optim.lr", "'' is a string."),
        ("zero.stage=1,2", "zero.stage", "1,2 is a sweep, and this is one run. Add -m"),
        ("zero=glob(*)", "zero", "is a sweep, and this is one run."),
        ("-m", "-m", "this is one run"),
        ("sweep=zero_stages", "sweep", "starts many runs, and this is one. Leave it out, or start"),
        ("experiment=first_lok", "experiment", "Did you mean  experiment=first_look?"),
        ("--zero=stage3", "--zero=stage3", "no such flag. Did you mean  zero=stage3?"),
        ("--foo", "--foo", "no such flag. Overrides have no dashes: key=value."),
        ("optim={lrr: 1}", "optim.lrr", "no such key. Did you mean  optim.lr "),
        ("optim=sgd optim.betas=[0.9,0.95]", "optim.betas", "does nothing with optim.kind=sgd."),
    ],
)
def test_a_word_that_cannot_be_meant(word: str, key: str, words: str) -> None:
    found, text = problem(
        *word.split(" ") if word.startswith(("optim=sgd", "offload=")) else [word]
    )
    assert found == key
    assert words in text


def test_every_fault_of_a_long_command_line_is_reported_once() -> None:
    """CF-01."""
    found = problems(
        "zero=stage4",
        "optim.lrr=1",
        "trainer.devices=x",
        "data.batch_size=7",
        "--foo",
        "model.heads=3",
        "moe=top3",
    )
    assert sorted(key for key, _ in found) == [
        "--foo",
        "model.heads",
        "moe",
        "optim.lrr",
        "trainer.devices",
        "zero",
    ]


# launchers (HY-14, CF-02 e)
@pytest.mark.parametrize(
    "flags", [["--local_rank=0"], ["--local-rank=0"], ["--local-rank", "1"], ["--local_rank", "1"]]
)
@pytest.mark.parametrize("environ", [{}, {"LOCAL_RANK": "1"}])
def test_a_launchers_local_rank_is_ignored(flags: list[str], environ: dict[str, str]) -> None:
    composed = compose(*flags, "zero=stage2", **environ)
    assert composed.overrides == ["zero=stage2"]
    assert composed.config.zero.stage == 2


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}


def test_ranks_that_exist_are_counted() -> None:
    composed = compose("launch=external", **TORCHRUN)
    trainer = composed.config.trainer
    assert (trainer.devices, trainer.num_nodes, composed.config.data_ranks) == (2, 2, 4)
    assert (
        composed.origins["trainer.devices"] == composed.origins["trainer.num_nodes"] == "torchrun"
    )
    assert composed.config.micro_batch_size == 6


def test_ranks_that_exist_and_others_that_were_asked_for() -> None:
    key, text = problem("launch=external", "trainer.devices=4", **TORCHRUN)
    assert key == "trainer.devices"
    assert text == "4 is not what runs. torchrun started 2; leave trainer.devices out."


def test_slurm_counts_as_well() -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
    composed = compose("launch=external", **environ)
    assert (composed.config.trainer.devices, composed.config.trainer.num_nodes) == (4, 2)
    assert composed.origins["trainer.devices"] == "Slurm"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"},
            "WORLD_SIZE=3 is not divisible",
        ),
        ({"RANK": "0", "WORLD_SIZE": "zwei"}, "WORLD_SIZE=zwei is not a number of ranks"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_NNODES": "2"}, "SLURM_NTASKS=3"),
    ],
)
def test_ranks_that_cannot_be_counted(environ: dict[str, str], words: str) -> None:
    key, text = problem("launch=external", **environ)
    assert key == "launch.kind"
    assert words in text


def test_ranks_are_not_started_inside_a_rank() -> None:
    key, text = problem(**TORCHRUN)
    assert key == "launch.kind"
    assert "would start ranks inside rank 3 of torchrun. Use launch=external." in text


# option files
def test_option_files_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("dim: 64\nlayers: 2\n")
    (tmp_path / "ablation").mkdir()
    (tmp_path / "ablation" / "low.yaml").write_text("# @package _global_\noptim:\n  lr: 0.001\n")
    for words in (
        ["model=mine", "+ablation=low", f"hydra.searchpath=[{tmp_path}]"],
        ["model=mine", "+ablation=low", f"hydra.searchpath=[file://{tmp_path}]"],
    ):
        composed = compose(*words)
        assert (composed.config.model.dim, composed.config.optim.lr) == (64, 0.001)
        assert composed.origins["model.dim"] == f"{tmp_path}/model/mine.yaml"
        assert composed.choices["ablation"] == "low"
    again = compose_anywhere(["model=mine"], environ={}, searchpath=[str(tmp_path)])
    assert again.config.model.layers == 2
    key, text = problem("ablation=low", f"hydra.searchpath=[{tmp_path}]")
    assert (key, text) == ("ablation", "is not in the defaults. Add it: +ablation=low.")


def test_a_fault_in_an_option_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("dmi: 64\nlayers: many\n")
    found = dict(problems("model=mine", f"hydra.searchpath=[{tmp_path}]"))
    assert "Did you mean  model.dim " in found["model.dmi"]
    assert "many is a string" in found["model.layers"]
    assert all(f"(in {tmp_path}/model/mine.yaml)" in text for text in found.values())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dim: [1\n", "expected"),
        ("- dim\n", "must hold a mapping"),
        ("defaults:\n  - /model/nothing\n", "nothing"),
    ],
)
def test_an_option_file_that_cannot_be_read(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(text)
    key, message = problem("model=mine", f"hydra.searchpath=[{tmp_path}]")
    assert key == "conf"
    assert words in message


def test_a_value_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("dim: ???\n")
    key, text = problem("model=mine", f"hydra.searchpath=[{tmp_path}]")
    assert (key, text.startswith("has no value (???).")) == ("model.dim", True)
    assert (
        compose("model=mine", "model.dim=64", f"hydra.searchpath=[{tmp_path}]").config.model.dim
        == 64
    )


# what it leaves be
def test_another_hydra_application_keeps_its_state(tmp_path: Path) -> None:
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    (tmp_path / "app.yaml").write_text("a: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        before = GlobalHydra.instance().hydra
        compose("zero=stage3")
        assert GlobalHydra.instance().hydra is before
        assert hydra.compose("app").a == 1


@pytest.mark.parametrize(
    "code",
    [
        "from zeroexp.config import compose; compose(['zero=stage3'], environ={}).config.digest()",
        "from zeroexp.config import explain, parse_multirun; explain('zero'); "
        "parse_multirun(['zero=stage0,stage1'])",
        "from zeroexp.config.reference import reference; reference()",
        "from zeroexp.config import Config; Config.from_mapping({}).resolved().digest()",
    ],
    ids=["compose", "explain and sweep", "reference", "mapping"],
)
def test_no_torch_is_imported(code: str) -> None:
    check = "; import sys; sys.exit(not {'torch', 'lightning', 'numpy'}.isdisjoint(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_a_mapping_needs_no_hydra() -> None:
    code = (
        "from zeroexp.config import Config; Config.from_mapping({'zero.stage': 3}); import sys; "
        "sys.exit('hydra' in sys.modules or 'omegaconf' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
