"""Where bytes live when they are not on the device: for now, files and the engine that moves them.

:class:`FileEngine` transfers between host memory and files in the background.
"""

from __future__ import annotations

from zeroexp.tiers.file import EngineStatus, File, FileEngine, Transfer

__all__ = ["EngineStatus", "File", "FileEngine", "Transfer"]
