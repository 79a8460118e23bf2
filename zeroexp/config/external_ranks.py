"""Ranks that somebody else started: what torchrun or Slurm say about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ExternalRanks:
    """``devices`` ranks on each of ``num_nodes`` nodes, as ``source`` (torchrun, Slurm) started
    them.
    """

    devices: int
    num_nodes: int
    source: str


def external_ranks(environ: Mapping[str, str]) -> ExternalRanks | None:
    """Who else started this process, and with how many ranks; None when it was started by hand.

    torchrun sets WORLD_SIZE and LOCAL_WORLD_SIZE, srun SLURM_PROCID, SLURM_NTASKS and SLURM_NNODES.

    Raises:
        ValueError: when the numbers are missing, are none, or do not spread evenly over the nodes.
    """
    if "WORLD_SIZE" in environ and "RANK" in environ:
        world = _number(environ, "WORLD_SIZE")
        local = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else world
        nodes, rest = divmod(world, local)
        if rest:
            raise ValueError(f"WORLD_SIZE={world} is not divisible by LOCAL_WORLD_SIZE={local}")
        return ExternalRanks(local, nodes, "torchrun")
    if "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ:
        world = _number(environ, "SLURM_NTASKS")
        nodes = _number(environ, "SLURM_NNODES") if "SLURM_NNODES" in environ else 1
        devices, rest = divmod(world, nodes)
        if rest:
            raise ValueError(f"SLURM_NTASKS={world} is not divisible by SLURM_NNODES={nodes}")
        return ExternalRanks(devices, nodes, "Slurm")
    return None


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text} is not a number of ranks")
    return int(text)
