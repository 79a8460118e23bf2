"""Processes, ranks, devices and small collectives: what the Trainer's and Fabric's strategy have
in common."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroexp.config import Config
from zeroexp.errors import ConfigError, Problem, ZeroexpError
from zeroexp.folder import check_writable
from zeroexp.strategies.compat import Namespace
from zeroexp.strategies.options import on_ranks
from zeroexp.strategies.side_group import SideGroup

START_METHODS = ("popen", "spawn", "fork", "forkserver")


def _in_hydra_sweep() -> bool:
    """Whether this is a job of ``hydra -m`` (Hydra is not imported for the question)."""
    core = sys.modules.get("hydra.core.hydra_config")
    if core is None or not core.HydraConfig.initialized():
        return False
    return str(core.HydraConfig.get().mode).endswith("MULTIRUN")


class Ranks:
    """Mixed into a Lightning strategy class, whose attributes the annotations name."""

    ns: Namespace
    asked: Config
    cluster_environment: Any
    parallel_devices: Any
    accelerator: Any
    _launcher: Any

    def init_ranks(self, config: Config, backend: str | None, start_method: str) -> None:
        """Take the options; nothing is started here (this runs in the parent of a launcher too)."""
        if start_method not in START_METHODS:
            known = ", ".join(START_METHODS)
            raise ConfigError(
                [Problem("start_method", f"{start_method!r} is none.", f"Use {known}.")]
            )
        self.asked = config
        self._num_nodes = 1
        self._backend = backend
        self._start_method = start_method
        self._side: SideGroup | None = None
        self._world: Any = None

    # ------------------------------------------------------------------ where this process is
    @property
    def is_distributed(self) -> bool:
        """Lightning asks foreign strategies; without it there is no distributed sampler."""
        return True

    @property
    def root_device(self) -> torch.device:
        device: torch.device = self.parallel_devices[self.cluster_environment.local_rank()]
        return device

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def data_ranks(self) -> int:
        """Ranks that read different data: those of a pipe read the same."""
        return max(1, self._num_nodes * self.num_processes // self.asked.pipeline.size)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {
            "num_replicas": self.data_ranks,
            "rank": self.cluster_environment.global_rank() % self.data_ranks,
        }

    @property
    def process_group_backend(self) -> str | None:
        return self._backend

    def set_world_ranks(self) -> None:
        """Tell the environment and Lightning's logging who we are."""
        environment = self.cluster_environment
        if environment is not None:
            node, local = environment.node_rank(), environment.local_rank()
            environment.set_global_rank(node * self.num_processes + local)
            environment.set_world_size(self._num_nodes * self.num_processes)
        from lightning_utilities.core.rank_zero import rank_zero_only

        rank = environment.global_rank() if environment is not None else 0
        rank_zero_only.rank = rank  # type: ignore[attr-defined]
        self.ns.rank_zero_only.rank = rank
        self.ns.fabric_rank_zero_only.rank = rank

    # ------------------------------------------------------------------ starting
    def make_launcher(self, script: Any, spawn: Any) -> None:
        """Attach Lightning's launcher, unless the ranks exist already (torchrun, Slurm) or are one.

        For one process the launcher would start nothing and leave LOCAL_RANK in the environment,
        where a later run with more ranks takes it for a sign that its ranks exist.
        """
        environment = self.cluster_environment
        if self._start_method != "popen":
            self._launcher = spawn(self, start_method=self._start_method)
        elif self._num_nodes * self.num_processes > 1 and not (
            environment.creates_processes_externally
        ):
            if self.num_processes > 1 and _in_hydra_sweep():
                raise ConfigError(
                    [
                        Problem(
                            "start_method",
                            "popen re-runs the command line, which under hydra -m starts the whole"
                            " sweep again.",
                            "Use ZeroStrategy(start_method='spawn'), or start the ranks with"
                            " torchrun.",
                        )
                    ]
                )
            self._launcher = script(environment, self.num_processes, self._num_nodes)

    def check_ranks(self) -> None:
        """Compare devices x nodes with the ranks that exist, before anything else is done.

        Lightning's launcher does so too, but where ranks exist already there is no launcher.
        """
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self._num_nodes
        )

    def check_folder(self) -> None:
        """Whether swap files can be written, before a model is built.

        Raises:
            ConfigError: on ``offload.nvme.dir``, with the path and the system's reason.
        """
        offload = self.asked.resolved().offload
        if offload.uses_files:
            check_writable(Path(str(offload.nvme.dir)), "offload.nvme.dir")

    def start_process_group(self) -> None:
        """Join the process group, or check the one that exists (before every stage of a run).

        Raises :class:`ZeroexpError` when the group that exists is not the one this run needs.
        """
        self.set_world_ranks()
        size = self._num_nodes * self.num_processes
        if size > 1 and not dist.is_initialized():
            backend = self._backend or self.ns.backend_for(self.root_device)
            on_card = self.root_device.type != "cpu"
            self.ns.init_dist_connection(
                self.cluster_environment,
                backend,
                timeout=datetime.timedelta(seconds=self.asked.launch.timeout),
                device_id=self.root_device if on_card else None,
            )
        if dist.is_initialized() and dist.get_world_size() != size:
            raise ZeroexpError(
                f"a process group of {dist.get_world_size()} ranks exists, and this run is for"
                f" {size} ({self.num_processes} devices x {self._num_nodes} nodes). An earlier run"
                " in this process made it: end it with torch.distributed.destroy_process_group(),"
                " or start this run in a process of its own."
            )
        world = dist.group.WORLD if dist.is_initialized() else None
        if self._side is None or self._world is not world:
            self._side, self._world = SideGroup(self.asked.launch.timeout), world

    def config_here(self, config: Config) -> Config:
        """``config`` for the ranks that run, resolved for this device."""
        kind = "cpu" if self.root_device.type == "cpu" else "gpu"
        return on_ranks(config, kind, max(self.num_processes, 1), self._num_nodes)

    # ------------------------------------------------------------------ collectives
    @property
    def side(self) -> SideGroup:
        """The group for barriers, objects and numbers; one process before the ranks have met."""
        return self._side if self._side is not None else SideGroup(self.asked.launch.timeout)

    def barrier(self, name: str | None = None) -> None:
        if self._side is not None:
            self._side.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._side is None else self._side.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor reduced over all ranks; anything else unchanged."""
        if self._side is None or not isinstance(tensor, Tensor):
            return tensor
        return self._side.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return tensor if self._side is None else self._side.all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._side is None else self._side.agree(bool(decision), every=all)
