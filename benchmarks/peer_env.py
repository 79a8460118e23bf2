"""The environment of its own that DeepSpeed lives in: made once, in ``.venv-peers`` beside the
repository's files (git ignores it).

torch comes first and is pinned, so that every mode runs the same torch; DeepSpeed then builds
against it. Its extensions (CPU Adam, asynchronous I/O) are compiled by ninja from
here; libaio, which the second needs, is optional: without it the rows that read and write by
DeepSpeed are missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import libaio

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-peers"
PYTHON = FOLDER / "bin" / "python"
# Where torch puts extensions that a peer compiles on first use: in the environment, so that a build
# is noticed and not inherited.
EXTENSIONS = FOLDER / "torch_extensions"
LIBAIO = FOLDER / "libaio"
STEPS = (
    ("torch==2.13.0", "numpy", "setuptools", "wheel", "ninja"),
    ("--no-build-isolation", "deepspeed==0.19.8"),
)


def variables() -> dict[str, str]:
    """What processes of the peers find in their environment variables beside ours."""
    return {
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        "PATH": f"{PYTHON.parent}:{os.environ.get('PATH', os.defpath)}",
        **libaio.variables(LIBAIO),
    }


def exists() -> bool:
    """True if the environment is complete, libaio apart."""
    if not PYTHON.exists():
        return False
    probe = [str(PYTHON), "-c", "import torch, deepspeed"]
    environment = {**os.environ, **variables()}
    return subprocess.run(probe, env=environment, capture_output=True, check=False).returncode == 0


def make() -> None:
    """Create the environment and install the peers; raises CalledProcessError with pip's own
    message on the terminal. What is optional and cannot be had is said in a line."""
    if not exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        for packages in STEPS:
            subprocess.run([str(PYTHON), "-m", "pip", "install", "--quiet", *packages], check=True)
    try:
        libaio.make(LIBAIO)
    except libaio.Missing as missing:
        print(f"missing: {missing}", flush=True)
    # A build that was killed leaves its lock, for which every later one waits without end.
    for lock in EXTENSIONS.glob("*/lock"):
        lock.unlink()
    compiling = [str(PYTHON), "-m", "benchmarks.peers.deepspeed_ops"]
    subprocess.run(
        compiling,
        cwd=ROOT,
        env={**os.environ, **variables()},
        stderr=subprocess.DEVNULL,
        check=False,
    )


def builds() -> list[str]:
    """Names of the extensions that a peer has compiled here on first use."""
    return sorted(path.parent.name for path in EXTENSIONS.glob("*/*.so")) + sorted(
        path.parent.name for path in EXTENSIONS.glob("*/*/*.so")
    )
