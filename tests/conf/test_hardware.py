"""What `auto` becomes, from made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroexp.config import hardware


@pytest.mark.parametrize(
    ("cpuinfo", "compute"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 avx512f avx512_bf16\n", "bf16"),
        ("processor\t: 0\nflags\t\t: fpu sse2 amx_bf16 amx_tile\n", "bf16"),
        ("processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f avx512_vnni\n", "fp32"),
        (
            "processor\t: 0\nmodel name\t: has avx512_bf16 in its name\nflags\t\t: fpu avx2\n",
            "fp32",
        ),
        ("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd bf16 i8mm\n", "bf16"),
        ("processor\t: 0\nFeatures\t: fp asimd\n", "fp32"),
        ("", "fp32"),
    ],
)
def test_bf16_only_where_the_processor_multiplies_it(
    tmp_path: Path, cpuinfo: str, compute: str
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    assert hardware.default_compute("cpu", hardware.cpu_flags(path)) == compute


def test_no_cpuinfo_at_all(tmp_path: Path) -> None:
    assert hardware.cpu_flags(tmp_path / "nothing") == frozenset()


def test_a_gpu_computes_in_bf16() -> None:
    assert hardware.default_compute("gpu", frozenset()) == "bf16"


@pytest.mark.parametrize(
    ("devices", "environ", "accelerator"),
    [
        ([], {}, "cpu"),
        (["nvidiactl"], {}, "cpu"),
        (["nvidia0"], {}, "cpu"),
        (["nvidiactl", "nvidia0"], {}, "gpu"),
        (["nvidiactl", "nvidia3"], {"CUDA_VISIBLE_DEVICES": "3"}, "gpu"),
        (["nvidiactl", "nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        (["nvidiactl", "nvidia0"], {"CUDA_VISIBLE_DEVICES": "-1"}, "cpu"),
    ],
)
def test_a_gpu_is_a_driver_with_a_visible_device(
    tmp_path: Path, devices: list[str], environ: dict[str, str], accelerator: str
) -> None:
    (tmp_path / "dev").mkdir()
    for name in devices:
        (tmp_path / "dev" / name).touch()
    assert hardware.default_accelerator(environ, tmp_path) == accelerator
