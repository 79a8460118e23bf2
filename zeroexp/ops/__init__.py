"""CPU ops that are bound by memory bandwidth, compiled where possible, in torch elsewhere.

Each op has one contract and two implementations: the kernel in ``zeroexp._C`` (built at install,
chosen for the CPU at run time) and the same arithmetic in torch. :func:`status` says which one is
in use and why.
"""

from __future__ import annotations

from zeroexp.ops.adagrad import adagrad_
from zeroexp.ops.adamw import adamw_
from zeroexp.ops.allocator import return_freed_memory
from zeroexp.ops.casts import scale_cast
from zeroexp.ops.checksums import checksum
from zeroexp.ops.edits import adopt_edits
from zeroexp.ops.host_range import HostRange, host_zeros
from zeroexp.ops.lion import lion_
from zeroexp.ops.native import OpsStatus, status
from zeroexp.ops.sgd import sgd_
from zeroexp.ops.sums import divide_into, sum_into, sum_squares

__all__ = [
    "HostRange",
    "OpsStatus",
    "adagrad_",
    "adamw_",
    "adopt_edits",
    "checksum",
    "divide_into",
    "host_zeros",
    "lion_",
    "return_freed_memory",
    "scale_cast",
    "sgd_",
    "status",
    "sum_into",
    "sum_squares",
]
