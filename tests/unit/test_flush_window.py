"""How the flush-window library gets into the raylet's environment, and how it is built."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from repro.errors import InputError, MachineError, WaitTimeoutError
from repro.ray_patches import flush_window

LIBRARY = Path("/lib/libprofiler_flush.so")


@pytest.fixture
def ray_dir(tmp_path: Path) -> Path:
    (tmp_path / "ray" / "core").mkdir(parents=True)
    (tmp_path / "ray" / "_version.py").touch()
    return tmp_path / "ray"


def test_rays_own_jemalloc_stays(ray_dir: Path) -> None:
    assert flush_window.environment(LIBRARY, ray_dir=ray_dir, environ={}) == {"RAY_JEMALLOC_LIB_PATH": str(LIBRARY)}
    jemalloc = ray_dir / "core" / "libjemalloc.so"
    jemalloc.touch()
    expected = {"RAY_JEMALLOC_LIB_PATH": f"{LIBRARY}:{jemalloc}"}
    assert flush_window.environment(LIBRARY, ray_dir=ray_dir, environ={}) == expected
    assert flush_window.environment(LIBRARY, ray_dir=ray_dir, environ=expected) == expected


def test_the_users_jemalloc_stays(ray_dir: Path) -> None:
    chosen = {"RAY_JEMALLOC_LIB_PATH": "/mine.so"}
    assert flush_window.environment(LIBRARY, ray_dir=ray_dir, environ=chosen) == {
        "RAY_JEMALLOC_LIB_PATH": f"{LIBRARY}:/mine.so"
    }
    assert flush_window.environment(LIBRARY, ray_dir=ray_dir, environ={"RAY_JEMALLOC_LIB_PATH": ""}) == {
        "RAY_JEMALLOC_LIB_PATH": str(LIBRARY)
    }


def test_a_preload_of_the_user_comes_first_for_ray_and_so_for_us(ray_dir: Path) -> None:
    assert flush_window.environment(LIBRARY, ray_dir=ray_dir, environ={"LD_PRELOAD": "/a.so /b.so"}) == {
        "LD_PRELOAD": f"{LIBRARY}:/a.so:/b.so"
    }


@pytest.mark.parametrize("path", ["/with blank/l.so", "/with:colon/l.so"])
def test_a_path_that_ld_preload_would_split_is_refused(path: str) -> None:
    with pytest.raises(InputError, match="separate libraries"):
        flush_window.environment(Path(path), environ={})


def test_what_is_built_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (flush_window.LIBRARY, flush_window.WARDEN):
        (tmp_path / name).touch()
    monkeypatch.setenv("PATH", "/nowhere")
    assert flush_window.build(tmp_path) == tmp_path / flush_window.LIBRARY


@pytest.mark.parametrize("missing", [flush_window.LIBRARY, flush_window.WARDEN])
def test_without_a_compiler_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in {flush_window.LIBRARY, flush_window.WARDEN} - {missing}:
        (tmp_path / name).touch()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MachineError, match="needs make, which is not on PATH") as caught:
        flush_window.build(tmp_path)
    assert "apt-get install" in caught.value.remedy


def test_a_failed_and_a_slow_build_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush_window.shutil, "which", lambda tool: tool)

    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 2, "", "error: no such thing")

    def hang(command: list[str], timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(flush_window.subprocess, "run", fail)
    with pytest.raises(MachineError, match="no such thing"):
        flush_window.build(tmp_path)
    monkeypatch.setattr(flush_window.subprocess, "run", hang)
    with pytest.raises(WaitTimeoutError, match="more than 300 s"):
        flush_window.build(tmp_path)


def test_loaded_looks_at_the_process() -> None:
    assert not flush_window.loaded(os.getpid())
    with pytest.raises(InputError, match="No such file"):
        flush_window.loaded(2**22 - 1)
