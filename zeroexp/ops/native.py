"""Loads the compiled ops and says which implementation is in use.

``ZEROEXP_ISA`` chooses by name: ``baseline``, ``avx2``, ``avx512`` (what the machine has), or
``reference`` for torch. Unset, the fastest one is taken. It is read once, when an op is first used.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

# Before zeroexp._C: both then share the OpenMP runtime that torch brings, and with it the thread
# pool.
import torch  # noqa: F401

from zeroexp.errors import ZeroexpError

if TYPE_CHECKING:
    from zeroexp import _C

REFERENCE = "reference"


@dataclass(frozen=True)
class OpsStatus:
    """Which ops run.

    ``compiled`` tells kernels from torch, ``isa`` names the instruction set (``baseline``,
    ``avx2``, ``avx512``; ``reference`` without kernels), ``reason`` is one line for a person.
    """

    compiled: bool
    isa: str
    reason: str


@dataclass(frozen=True)
class Native:
    """The loaded extension (None: torch does the work) and the status that goes with it."""

    kernels: _C.Kernels | None
    host_range: type[_C.HostRange] | None
    status: OpsStatus
    file_engine: type[_C.FileEngine] | None = None
    checksum: Callable[..., int] | None = None


def select(wanted: str) -> Native:
    """Loads the ops for one value of ``ZEROEXP_ISA`` ("" takes the fastest).

    Raises ZeroexpError when the machine or the installation has no kernels of that name.
    """
    if wanted == REFERENCE:
        status = OpsStatus(False, REFERENCE, "ZEROEXP_ISA=reference asks for torch's operations")
        return Native(None, None, status)
    try:
        from zeroexp import _C
    except ImportError as error:
        if wanted:
            raise ZeroexpError(
                f"ZEROEXP_ISA={wanted}, but the compiled ops cannot be loaded ({error}); "
                "unset it, or install zeroexp where a C++ compiler is found"
            ) from error
        return Native(
            None, None, OpsStatus(False, REFERENCE, f"the compiled ops cannot be loaded: {error}")
        )
    available = _C.available_isas()
    if wanted and wanted not in available:
        raise ZeroexpError(
            f"ZEROEXP_ISA={wanted}: this machine has {', '.join(available)}; "
            f"{REFERENCE} works everywhere"
        )
    kernels = _C.Kernels(wanted)
    reason = f"ZEROEXP_ISA={wanted}" if wanted else f"the fastest of {', '.join(available)}"
    status = OpsStatus(True, kernels.isa, reason)
    return Native(kernels, _C.HostRange, status, _C.FileEngine, kernels.checksum)


@functools.cache
def native() -> Native:
    """The ops of this process."""
    return select(os.environ.get("ZEROEXP_ISA", ""))


def status() -> OpsStatus:
    """Which implementation of the ops this process uses, and why."""
    return native().status
