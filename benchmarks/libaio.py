"""The one library that DeepSpeed's asynchronous I/O needs from the system: Debian's package files,
unpacked into the peers' environment where the system itself has none. No root, nothing installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

HEADERS = "libaio-dev"
LIBRARIES = ("libaio1t64", "libaio1")  # from Debian 13 on, and before
_PROGRAM = "#include <libaio.h>\nint main(void) { return io_setup == 0; }\n"


class Missing(Exception):
    """It cannot be had here; the message is the reason."""


def variables(folder: Path) -> dict[str, str]:
    """Where compilers, linkers and programs find what :func:`make` unpacked below ``folder``; empty
    where nothing is."""
    places = sorted(path.parent for path in folder.glob("usr/lib/*/libaio.so"))
    if not places:
        return {}
    wanted = {
        "CPATH": [folder / "usr" / "include"],
        "LIBRARY_PATH": places,
        "LD_LIBRARY_PATH": places,
    }
    return {
        name: ":".join([*map(str, paths), *filter(None, [os.environ.get(name)])])
        for name, paths in wanted.items()
    }


def usable(folder: Path) -> bool:
    """Whether a program that uses libaio compiles and links, with the system's or with ours."""
    command = [os.environ.get("CC", "cc"), "-x", "c", "-", "-laio", "-o", "/dev/null"]
    environment = {**os.environ, **variables(folder)}
    try:
        done = subprocess.run(
            command, env=environment, input=_PROGRAM, text=True, capture_output=True, check=False
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


def make(folder: Path) -> None:
    """Unpack headers and library below ``folder`` unless they are usable already. Raises
    Missing."""
    if usable(folder):
        return
    for tool in (os.environ.get("CC", "cc"), "apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Missing(f"libaio: no headers here, and no {tool} to get or use them")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options: list[str] = []
    try:
        _run(["apt-get", "download", HEADERS], folder)
    except Missing:
        # No lists of packages, or old ones: fetch lists of our own.
        options = _own_state(folder)
        _run(["apt-get", *options, "update"], folder)
        _run(["apt-get", *options, "download", HEADERS], folder)
    for name in LIBRARIES:
        try:
            _run(["apt-get", *options, "download", name], folder)
            break
        except Missing:
            if name == LIBRARIES[-1]:
                raise
    for package in folder.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(folder)], folder)
    if not usable(folder):
        raise Missing("libaio: Debian's package was unpacked, but a program does not link with it")


def _own_state(folder: Path) -> list[str]:
    """Options by which apt keeps its state below ``folder``, where it needs no root."""
    settings = {
        "Dir::State": folder / "state",
        "Dir::Cache": folder / "cache",
        "Dir::State::status": "/dev/null",
        "APT::Sandbox::User": "",  # as who calls, root or not
    }
    for path in ("state/lists/partial", "cache/archives/partial"):
        (folder / path).mkdir(parents=True, exist_ok=True)
    return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("E:")]
        reason = (lines or done.stderr.splitlines() or ["no output"])[-1].removeprefix("E: ")
        verb = next((w for w in command[1:] if w in ("download", "update", "-x")), "")
        raise Missing(f"libaio: {command[0]} {verb}: {reason}")
