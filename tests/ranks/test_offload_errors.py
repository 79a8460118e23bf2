"""What must not come between a backward and its step, and files that are changed, cut or refused:
one message, on every rank, and nothing wrong reaches a weight."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_lab import Bench, part
from small import caught, digest, mlp, rank, regression
from torch import Tensor
from torch.nn import functional as F

from zeroexp.engine import Engine

WIDTHS = (40, 160, 120, 3)
OFF = "offload.step_in_backward=false"


def bench(stage: int, kind: str, folder: str, **keys: Any) -> Bench:
    return Bench(stage, folder, offload_kind=kind, **keys)


def made(lab: Bench, widths: tuple[int, ...] = WIDTHS, **keys: Any) -> Engine:
    module = mlp(*widths)
    return lab.engine(module, torch.optim.AdamW(module.parameters(), lr=1e-2), **keys)


def loss_of(engine: Engine, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(engine(part(x)), part(y))


def go(engine: Engine, steps: int, start: int = 0) -> None:
    for x, y in regression(start + steps, 8, WIDTHS[0], WIDTHS[-1])[start:]:
        engine.backward(loss_of(engine, x, y))
        engine.step()


# -- between backward and step ---------------------------------------------------------------------


def _other_rate(engine: Engine, loss: Tensor) -> None:
    engine.optimizers[0].param_groups[0]["lr"] = 1e-3
    engine.step()


BETWEEN: dict[str, tuple[str, Callable[[Engine, Tensor], Any]]] = {
    "rate": ("OptimizerError", _other_rate),
    "zero_grad": ("ModelError", lambda engine, loss: engine.zero_grad()),
    "optimizer.zero_grad": ("ModelError", lambda engine, loss: engine.optimizers[0].zero_grad()),
    "backward": ("ModelError", lambda engine, loss: engine.backward(loss)),
    "bare backward": ("ModelError", lambda engine, loss: loss.backward()),
    "forward": ("ModelError", lambda engine, loss: engine(torch.ones(2, WIDTHS[0]))),
    "clip_norm": ("ModelError", lambda engine, loss: engine.clip_norm(1.0)),
    "clip_value": ("ModelError", lambda engine, loss: engine.clip_value(1.0)),
    "full_grad": (
        "ModelError",
        lambda engine, loss: engine.full_grad(next(iter(engine.model.params.values()))),
    ),
}


def between(name: str, kind: str, folder: str) -> tuple[str, str]:
    engine = made(bench(3, kind, folder))
    go(engine, 1)
    x, y = regression(2, 8, WIDTHS[0], WIDTHS[-1])[1]
    loss = loss_of(engine, x, y)
    engine.backward(loss, retain_graph=True)
    return caught(BETWEEN[name][1], engine, loss)


@pytest.mark.parametrize("name", BETWEEN)
def test_what_may_not_come_between(ranks, tmp_path, name):
    for num_ranks, kind in ((1, "cpu"), (1, "nvme_params"), (2, "nvme")):
        for error, said in ranks(num_ranks)(between, name, kind, str(tmp_path)):
            assert (error, OFF in said) == (BETWEEN[name][0], True), f"{kind}: {error}: {said}"


def refused(stage: int, folder: str, how: str) -> tuple[str, str]:
    lab = Bench(stage, folder, offload_kind="cpu", offload_step_in_backward="true")
    if how != "several":
        return caught(made, lab, clip=0.5 if how == "clip" else None)
    module = mlp(*WIDTHS)
    halves = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (module[0], module[2])]
    return caught(lab.engine, module, halves)


@pytest.mark.parametrize(
    ("how", "stage", "error"),
    [("several", 3, "OptimizerError"), ("clip", 3, "ConfigError"), ("stage", 0, "ConfigError")],
)
def test_true_is_refused_where_it_cannot_be(ranks, tmp_path, how, stage, error):
    for kind, said in ranks(2)(refused, stage, str(tmp_path), how):
        assert kind == error, said
        assert "offload.step_in_backward" in said and "auto" in said


# -- after a step that was torn --------------------------------------------------------------------


class Breaks(torch.autograd.Function):
    """The identity, whose backward raises, or makes everything below not a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.how == "raise":
            raise KeyError("on purpose")
        return grad * float("nan"), None


def torn(kind: str, how: str, folder: str) -> dict[str, Any]:
    """The last units are stepped when the first one fails; then a checkpoint is loaded."""
    engine = made(bench(3, kind, folder), (40, 72, 72, 72, 72, 72, 3))
    go(engine, 2)
    saved = Path(folder) / f"saved-{kind}-{how}"
    engine.save_checkpoint(saved)
    (group,) = engine.optimizers[0].param_groups
    group["lr"] = 2e-3
    go(engine, 2, 2)
    found: dict[str, Any] = {"wanted": digest(engine.state_dict())}
    group["lr"] = 3e-3
    ahead = []
    stepper = engine.steppers[0]
    original = stepper.step_ahead
    stepper.step_ahead = lambda s, v: ahead.append(s.tag) or original(s, v)
    module = engine.module
    handle = module[0].register_forward_hook(lambda m, a, out: Breaks.apply(out, how))
    x, y = regression(3, 8, WIDTHS[0], WIDTHS[-1])[2]

    def broken() -> None:
        engine.backward(loss_of(engine, x, y))
        engine.step()

    found["error"] = caught(broken)
    found["ahead"] = len(ahead)
    if how == "raise":
        found["dropped"] = caught(engine.zero_grad)
    handle.remove()
    engine.load_checkpoint(saved)
    group["lr"] = 2e-3
    go(engine, 2, 2)
    found["again"] = digest(engine.state_dict())
    engine.close()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_checkpoint_mends_a_torn_step(ranks, tmp_path, how, num_ranks):
    for kind in ("cpu", "nvme", "nvme_params"):
        for found in ranks(num_ranks)(torn, kind, how, str(tmp_path)):
            assert found["ahead"] > 0
            assert found["error"][0] == ("KeyError" if how == "raise" else "NonFiniteError")
            said = found["error"][1] if how == "nan" else found["dropped"][1]
            assert "offload.step_in_backward" in said and "checkpoint" in said, said
            assert found["again"] == found["wanted"], kind


# -- files -----------------------------------------------------------------------------------------


def swap_files(folder: str, what: str) -> list[Path]:
    mine = [p for p in Path(folder).glob(f"*-rank{rank()}/{what}-*.swap")]
    assert mine, f"no file of {what}"
    return mine


def flip(path: Path, at: int = 100) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
        file.flush()
        os.fsync(file.fileno())


def damaged(kind: str, what: str, how: str, stage: int, folder: str) -> dict[str, Any]:
    engine = made(bench(stage, kind, folder, offload_step_in_backward="false"))
    go(engine, 2)
    x, y = regression(3, 8, WIDTHS[0], WIDTHS[-1])[2]

    def harm() -> None:
        engine.disk.flush()
        for path in swap_files(folder, what):
            if how == "flip":
                flip(path)
            else:
                os.truncate(path, 64)

    def rest() -> None:
        if what != "grads":
            harm()
        loss = loss_of(engine, x, y)
        engine.backward(loss)
        if what == "grads":
            harm()
        engine.step()

    error, said = caught(rest)
    return {"error": error, "said": said, "files": [str(p) for p in swap_files(folder, what)]}


@pytest.mark.parametrize("how", ["flip", "cut"])
@pytest.mark.parametrize(
    ("kind", "what", "stage"),
    [
        ("nvme", "optim", 0),
        ("nvme", "optim", 3),
        ("nvme_params", "optim", 3),
        ("nvme_params", "params", 1),
        ("nvme_params", "params", 3),
        ("nvme_params", "grads", 2),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(ranks, tmp_path, kind, what, stage, how):
    (found,) = ranks(1)(damaged, kind, what, how, stage, str(tmp_path))
    assert found["error"] == ("SwapError" if how == "flip" else "FileError"), found
    assert any(path in found["said"] for path in found["files"])


PROGRAM = """
    import os, resource, signal, sys
    import torch
    from pathlib import Path
    from torch import nn
    sys.path.insert(0, {tests!r})
    from small import mlp, settings
    from zeroexp.engine import Engine

    folder, what = sys.argv[1:]
    module = mlp(40, 160, 120, 3)

    def limited(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    if what == "create":
        limited(2**16)
    engine = Engine(module, torch.optim.AdamW(module.parameters()), settings(
        3, offload_kind="nvme_params", offload_chunk=2**16, nvme_dir=folder))
    (own,) = Path(folder).iterdir()
    print("made", [p.stat().st_blocks * 512 >= p.stat().st_size for p in own.glob("*.swap")])
    for step in range(4):
        if step == 2 and what == "write":
            limited(2**16)
        if step == 2 and what == "raise":
            raise KeyError("on purpose")
        if step == 2 and what == "exit":
            sys.exit(3)
        if step == 2 and what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        engine.backward(engine(torch.ones(2, 40)).square().mean())
        engine.step()
    print("done")
"""


def program(folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(PROGRAM).format(tests=str(Path(__file__).parent))
    return subprocess.run(
        [sys.executable, "-c", code, str(folder), what],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("create", 1, "FileError"),
        ("write", 1, "FileError"),
        ("raise", 1, "on purpose"),
        ("exit", 3, ""),
        ("end", 0, ""),
    ],
)
def test_nothing_is_left_of_a_run(tmp_path, what, status, said):
    """Files that may not grow are an error that names file and fix; however a run ends by itself,
    its folder is gone."""
    done = program(tmp_path, what)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert ("done" in done.stdout) == (what == "end")
    if status == 1 and what != "raise":
        last = done.stderr.strip().splitlines()[-1]
        assert str(tmp_path) in last and "raise the limit (ulimit -f)" in last
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_swept_by_the_next(tmp_path):
    assert program(tmp_path, "kill").returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    assert program(tmp_path, "end").returncode == 0
    assert list(tmp_path.iterdir()) == []


# -- gradients that come late ----------------------------------------------------------------------


def twice_in_one_backward(folder: str, ready: bool) -> tuple[str, str]:
    """Gradients of a unit arrive again after they were reduced, in one backward."""
    engine = made(bench(3, "cpu", folder))
    go(engine, 1)
    if not ready:  # nothing is stepped here, but another rank might have
        engine._early._ready = lambda unit: False
    x, y = regression(2, 8, WIDTHS[0], WIDTHS[-1])[1]
    loss = loss_of(engine, x, y)

    def twice() -> None:
        with engine.backward_scope(last=True):
            loss.backward(retain_graph=True)
            loss.backward()
        engine.step()

    return caught(twice)


@pytest.mark.parametrize("ready", [True, False])
def test_gradients_that_come_after_the_step_are_refused(ranks, tmp_path, ready):
    for error, said in ranks(1)(twice_in_one_backward, str(tmp_path), ready):
        assert (error, OFF in said) == ("ModelError", True), f"{error}: {said}"
