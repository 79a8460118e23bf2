"""Processes of their own: Lightning's launchers, a rank that raises, SIGTERM, deadlines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]

LIMIT = 120.0  # seconds for a whole script, imports on a loaded machine included

HEAD = """
    import hashlib, logging, os, sys, time, warnings
    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
    from zeroexp.strategies import ZeroStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    FOLDER = sys.argv[1]

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def training_step(self, batch, batch_idx):
            self.happens(batch_idx)
            for layer in self.layers:
                batch = layer(batch).tanh()
            return batch.pow(2).mean()

        def happens(self, batch_idx):
            pass

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    def run(net, batches=4, **kwargs):
        options = dict(accelerator="cpu", devices=2, max_epochs=1, logger=False,
                       enable_progress_bar=False, enable_model_summary=False,
                       enable_checkpointing=False, default_root_dir=FOLDER)
        trainer = pl.Trainer(**{**options, **kwargs})
        rows = torch.randn(2 * batches, 4, generator=torch.Generator().manual_seed(0))
        trainer.fit(net, DataLoader(rows, batch_size=1))
        return trainer

    def digest(net):
        flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Scripts:
    """Runs one script as several ranks (as under torchrun) or alone, and ends what it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[str]] = []

    def start(self, body: str, size: int | None, **env: str) -> list[subprocess.Popen[str]]:
        script = self.folder / "script.py"
        script.write_text(textwrap.dedent(HEAD) + textwrap.dedent(body))
        port = str(free_port())
        for rank in range(size or 1):
            elastic = {
                "TORCHELASTIC_RUN_ID": "test",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            given = {**(elastic if size else {}), "OMP_NUM_THREADS": "1", **env}
            self.running.append(
                subprocess.Popen(
                    [sys.executable, str(script), str(self.folder)],
                    env={**os.environ, **given},
                    cwd=self.folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        return self.running

    def finish(self) -> list[tuple[int, str]]:
        """Exit code and output of each; a process that is still there after the limit is a
        failure."""
        until = time.monotonic() + LIMIT
        ended = []
        for process in self.running:
            output, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
            ended.append((process.returncode, output))
        return ended

    def close(self) -> None:
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    started = Scripts(tmp_path)
    yield started
    started.close()


def saved(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("*.ckpt"))


# --------------------------------------------------------------------------------- launchers


@pytest.mark.parametrize("method", ["popen", "spawn"])
def test_lightnings_launchers_start_the_ranks(scripts: Scripts, method: str) -> None:
    """No torchrun: a registered name with popen, an instance with spawn (which pickles the
    strategy)."""
    chosen = "'zeroexp_stage_3'" if method == "popen" else "ZeroStrategy(3, start_method='spawn')"
    scripts.start(
        f"""
        class Tells(Net):
            def on_train_end(self):
                state = self.trainer.strategy.engine.ledger.state_bytes()
                line = (self.global_rank, self.trainer.world_size, sum(state["params"].values()))
                with open(FOLDER + "/rank%d" % self.global_rank, "w") as out:
                    print(*line, file=out)

        if __name__ == "__main__":
            run(Tells(), strategy={chosen})
        """,
        size=None,
    )
    [(code, output)] = scripts.finish()
    assert code == 0, output
    told = [(scripts.folder / f"rank{rank}").read_text().split() for rank in (0, 1)]
    # 2 layers x 20 parameters, 32 elements with alignment; stage 3 keeps half of them, in fp32
    assert [line[:2] for line in told] == [["0", "2"], ["1", "2"]]
    assert [int(line[2]) for line in told] == [2 * 16 * 4] * 2


def test_a_trainer_for_fewer_ranks_than_there_are_is_refused(scripts: Scripts) -> None:
    """Each rank would train alone, and all of them would write the same files."""
    scripts.start("run(Net(), devices=1, strategy=ZeroStrategy(1))", size=2)
    for code, output in scripts.finish():
        assert code == 1
        assert "1" in output and "2" in output
        assert "WORLD_SIZE" in output or "world size" in output or "process group of" in output


# --------------------------------------------------------------------------------- a rank that
# fails

RAISES = """
    class Raises(Net):
        def happens(self, batch_idx):
            if batch_idx == 2 and self.global_rank in {ranks}:
                raise ValueError("boom on %d" % self.global_rank)

    keep = pl.callbacks.ModelCheckpoint(FOLDER, "last", save_on_exception=True)
    net = Raises()
    try:
        run(net, strategy=ZeroStrategy(3), callbacks=[keep], enable_checkpointing=True)
    except ValueError:
        print("left at", time.monotonic())
        raise
"""


def test_an_exception_on_one_rank_does_not_hang(scripts: Scripts) -> None:
    """PL-10: even with a callback that saves on exceptions, which needs every rank: it gives up
    after a few seconds. Both processes end, not with 0, and the one that raised says what."""
    scripts.start(RAISES.format(ranks="(1,)"), size=2)
    (code0, output0), (code1, output1) = scripts.finish()
    assert code0 != 0
    assert code1 == 1
    assert output1.rstrip().endswith("ValueError: boom on 1")
    assert "no checkpoint is saved" in output1
    assert "boom" not in output0
    assert saved(scripts.folder) == []


def test_an_exception_on_every_rank_saves_if_asked(scripts: Scripts) -> None:
    scripts.start(RAISES.format(ranks="(0, 1)"), size=2)
    for rank, (code, output) in enumerate(scripts.finish()):
        assert code == 1
        assert output.rstrip().endswith(f"ValueError: boom on {rank}")
    assert len(saved(scripts.folder)) == 1


# --------------------------------------------------------------------------------- SIGTERM

WAITS = """
    class Waits(Net):
        def happens(self, batch_idx):
            with open(FOLDER + "/rank%d" % self.global_rank, "w") as out:
                out.write(str(batch_idx))
            time.sleep(0.05)

    class Keeps(pl.Callback):
        def on_exception(self, trainer, module, exception):
            trainer.save_checkpoint(FOLDER + "/stopped.ckpt")
            print("stopped after", trainer.global_step, type(exception).__name__)

    run(Waits(), batches=2000, strategy=ZeroStrategy(3), callbacks=[Keeps()])
    print("finished")
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_on_either_rank_stops_both_at_one_step(scripts: Scripts, rank: int) -> None:
    processes = scripts.start(WAITS, size=2)
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        reached = [scripts.folder / f"rank{r}" for r in (0, 1)]
        if all(p.exists() and p.read_text() >= "2" for p in reached):
            break
        time.sleep(0.1)
    processes[rank].send_signal(signal.SIGTERM)
    ended = scripts.finish()
    said = [
        [line for line in output.splitlines() if "stopped after" in line] for _, output in ended
    ]
    assert [code for code, _ in ended] == [143, 143], ended
    assert said[0] == said[1]
    assert len(said[0]) == 1
    assert said[0][0].endswith("SIGTERMException")
    assert saved(scripts.folder) == ["stopped.ckpt"]


# --------------------------------------------------------------------------------- deadlines


def test_a_rank_that_does_not_come_is_named(scripts: Scripts) -> None:
    scripts.start(
        """
        class Sleeps(Net):
            def happens(self, batch_idx):
                if batch_idx == 1 and self.global_rank == 1:
                    time.sleep(30)

        run(Net() if os.environ["RANK"] == "0" else Sleeps(), strategy=ZeroStrategy(3, timeout=12))
        """,
        size=2,
    )
    (code, output), _ = scripts.finish()
    assert code == 1
    assert "CollectiveTimeout" in output
