from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.unit.ops.conftest import COMPILED
from zeroexp import ops
from zeroexp.errors import ZeroexpError
from zeroexp.ops.native import select


def status_in_a_fresh_process(isa: str, hide_extension: bool = False) -> str:
    hide = "import sys; sys.modules['zeroexp._C'] = None; " if hide_extension else ""
    code = f"{hide}from zeroexp import ops; s = ops.status(); print(s.compiled, s.isa, s.reason)"
    environment = {**os.environ, "ZEROEXP_ISA": isa}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    return result.stdout.strip() or result.stderr.strip().splitlines()[-1]


def test_the_fastest_is_chosen(isa: str) -> None:
    if not COMPILED:
        pytest.skip("no compiled ops here")
    assert select("").status.isa == COMPILED[-1]
    assert select(isa).status.isa == isa


def test_the_environment_chooses() -> None:
    assert status_in_a_fresh_process("reference").startswith(
        "False reference ZEROEXP_ISA=reference"
    )


def test_without_the_extension_torch_does_the_work() -> None:
    line = status_in_a_fresh_process("", hide_extension=True)
    assert line.startswith("False reference the compiled ops cannot be loaded")


def test_a_name_that_is_not_there_is_refused_with_the_choices() -> None:
    if not COMPILED:
        pytest.skip("no compiled ops here")
    with pytest.raises(
        ZeroexpError, match=r"ZEROEXP_ISA=mmx: this machine has baseline.*reference"
    ):
        select("mmx")


def test_status_says_why() -> None:
    status = ops.status()
    assert status.isa in {"reference", "baseline", "avx2", "avx512"}
    assert status.compiled == (status.isa != "reference")
    assert status.reason
