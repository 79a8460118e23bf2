"""What is shipped: the sdist, the wheel made from it, and the wheel made without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE_PACKAGES = sysconfig.get_paths()["purelib"]

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake"),
]


def build(hook: str, source: Path, out: Path, **environment: str) -> Path:
    """Calls the build backend as pip does without isolation."""
    out.mkdir(parents=True)
    code = f"import scikit_build_core.build as backend; print(backend.{hook}({str(out)!r}))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return out / result.stdout.splitlines()[-1]


def python_without_site(
    code: str, cwd: Path, *path: Path | str
) -> subprocess.CompletedProcess[str]:
    """A Python that knows of no editable installation: -S leaves out the .pth files."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(p) for p in path)}
    environment.pop("ZEROEXP_ISA", None)
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_sdist", ROOT, tmp_path_factory.mktemp("sdist") / "out")


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", unpacked, tmp_path_factory.mktemp("wheel") / "out")


@pytest.fixture(scope="module")
def wheel_without_compiler(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("no_compiler") / "out"
    return build("build_wheel", unpacked, out, CXX="/no/such/compiler")


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def installed(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def files_under(folder: Path, suffixes: tuple[str, ...]) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    }


def test_sdist_has_the_sources_and_nothing_of_the_workshop(unpacked: Path) -> None:
    top = {path.name for path in unpacked.iterdir()}
    assert {"zeroexp", "strategies", "conf", "experiments", "csrc", "CMakeLists.txt"} <= top
    assert {"pyproject.toml", "LICENSE", "README.md"} <= top
    assert not top & {"tests", "benchmarks", "docs", ".venv", "runs", "build", ".ci"}
    assert not list(unpacked.rglob("*.so")) and not list(unpacked.rglob("__pycache__"))


def test_wheel_installs_zeroexp_and_nothing_else(wheel: Path) -> None:
    assert {name.split("/")[0] for name in names(wheel)} == {"zeroexp"}


def test_wheel_has_every_part_under_its_installed_name(wheel: Path) -> None:
    have = names(wheel)
    for source, package, suffixes in (
        ("zeroexp", "zeroexp", (".py", ".pyi")),
        ("strategies", "zeroexp/strategies", (".py",)),
        ("conf", "zeroexp/conf", (".py", ".yaml")),
        ("experiments", "zeroexp/experiments", (".py", ".yaml")),
    ):
        want = {
            f"{package}/{name}"
            for name in files_under(ROOT / source, suffixes)
            if not name.startswith("reports/")
        }
        assert want and want <= have, sorted(want - have)
    assert not [name for name in have if name.startswith("zeroexp/experiments/reports")]
    assert "zeroexp/conf/__init__.py" in have, "Hydra finds pkg://zeroexp.conf by it"


def test_wheel_has_the_extension_where_there_is_a_compiler(wheel: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    extensions = [name for name in names(wheel) if name.startswith("zeroexp/_C.") and ".so" in name]
    assert len(extensions) == 1


def test_an_installed_copy_composes_its_configuration(wheel: Path, tmp_path: Path) -> None:
    target = installed(wheel, tmp_path / "site")
    code = (
        "import zeroexp; from zeroexp.config import compose; "
        "print(zeroexp.__file__, compose(['zero=stage3']).config.zero.stage)"
    )
    result = python_without_site(code, tmp_path, target, SITE_PACKAGES)
    assert result.stdout.split() == [str(target / "zeroexp" / "__init__.py"), "3"], result.stderr


def test_without_a_compiler_the_ops_still_work(
    wheel_without_compiler: Path, tmp_path: Path
) -> None:
    assert not [name for name in names(wheel_without_compiler) if ".so" in name]
    target = installed(wheel_without_compiler, tmp_path / "site")
    code = (
        "import torch; from zeroexp import ops; s = ops.status(); "
        "print(s.compiled, s.isa, ops.sum_squares(torch.full((3,), 2.0)))"
    )
    result = python_without_site(code, tmp_path, target, SITE_PACKAGES)
    assert result.stdout.split() == ["False", "reference", "12.0"], result.stderr


def test_the_source_folder_refuses_to_be_the_package(unpacked: Path) -> None:
    """`pip install .`, then `python train.py` inside the checkout: ./zeroexp comes first."""
    result = python_without_site("import zeroexp", unpacked)
    assert result.returncode != 0
    assert result.stderr.rstrip().endswith(f"run:  pip install -e {unpacked}")
