"""What every test relies on: one thread per process, and the markers that choose what runs."""

from __future__ import annotations

import os
import sysconfig

# Before torch is imported anywhere: tests share two cores, and thread counts must not decide how
# long they take.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The tools of this environment (cmake, ninja, torchrun) are found without activating it.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])

import pytest
from hypothesis import HealthCheck, settings

# The same examples every time: a failure seen once is seen again. No deadline: a slow machine is no
# defect.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_full = pytest.mark.skip(reason="long; run with --full")
    skip_gpu = pytest.mark.skip(reason="needs a CUDA device")
    gpu_tests = [item for item in items if "gpu" in item.keywords]
    has_gpu = bool(gpu_tests) and _has_gpu()  # torch is imported only if a test asks for it
    for item in items:
        if "full" in item.keywords and not config.getoption("--full"):
            item.add_marker(skip_full)
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(skip_gpu)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
