"""Where bytes live when they are not on the device: files, and the engine that moves them.

:class:`FileEngine` transfers between host memory and files in the background. :class:`SwapFile`
keeps records in such a file and passes them through the slots of a :class:`Ring`;
:class:`ScratchFolder` is where such files lie, :class:`Traffic` counts what they move. A
:class:`Border` is what tensors cross between the device's memory and the host's.
"""

from __future__ import annotations

from zeroexp.scratch import ScratchFolder
from zeroexp.tiers.border import Border, Crossing, border_of
from zeroexp.tiers.file import EngineStatus, File, FileEngine, Transfer
from zeroexp.tiers.pending import Pending
from zeroexp.tiers.ring import Ring
from zeroexp.tiers.swap_file import SwapFile
from zeroexp.tiers.traffic import Moved, Traffic

__all__ = [
    "Border",
    "Crossing",
    "EngineStatus",
    "File",
    "FileEngine",
    "Moved",
    "Pending",
    "Ring",
    "ScratchFolder",
    "SwapFile",
    "Traffic",
    "Transfer",
    "border_of",
]
