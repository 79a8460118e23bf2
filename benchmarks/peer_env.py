"""The environment of its own that DeepSpeed lives in: made once, in ``.venv-peers`` beside the
repository's files (git ignores it).

torch comes first and is pinned, so that every mode runs the same torch; DeepSpeed then builds
against it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-peers"
PYTHON = FOLDER / "bin" / "python"
# Where torch puts extensions that a peer compiles on first use: in the environment, so that a build
# is noticed and not inherited.
EXTENSIONS = FOLDER / "torch_extensions"
STEPS = (
    ("torch==2.13.0", "numpy", "setuptools", "wheel", "ninja"),
    ("--no-build-isolation", "deepspeed==0.19.8"),
)


def exists() -> bool:
    """True if the environment is complete."""
    if not PYTHON.exists():
        return False
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    probe = [str(PYTHON), "-c", "import torch, deepspeed"]
    return subprocess.run(probe, env=environment, capture_output=True, check=False).returncode == 0


def make() -> None:
    """Create the environment and install the peers; raises CalledProcessError with pip's own
    message on the terminal."""
    if exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    for packages in STEPS:
        subprocess.run([str(PYTHON), "-m", "pip", "install", "--quiet", *packages], check=True)


def builds() -> list[str]:
    """Names of the extensions that a peer has compiled here on first use."""
    return sorted(path.parent.name for path in EXTENSIONS.glob("*/*.so")) + sorted(
        path.parent.name for path in EXTENSIONS.glob("*/*/*.so")
    )
