"""The source hooks compiled into a stand-in for the raylet, with warnings as errors as in Ray's own build, and run.

Ray itself cannot be built here. The stand-in is a few lines around the hooks' anchors and has nothing of Ray's code: a
syntax or type error in what is inserted shows, and so does a hook that does not do its part.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from repro.ray_patches import flush_source

pytestmark = pytest.mark.needs("g++")

STAND_IN = Path(__file__).with_name("raylet_stand_in")
LIMIT_S = 120.0
COMPILE = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Isrc"]


def checkout(folder: Path, *, hooked: bool) -> Path:
    tree = shutil.copytree(STAND_IN, folder / "tree")
    if hooked:
        flush_source.apply(tree)
    return tree


def compile_in(tree: Path, *arguments: str) -> None:
    done = subprocess.run([*COMPILE, *arguments], cwd=tree, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("hooked", [False, True], ids=["stock", "hooked"])
def test_only_the_hooked_raylet_leaves_a_whole_report(tmp_path: Path, hooked: bool) -> None:
    tree = checkout(tmp_path, hooked=hooked)
    compile_in(tree, "-o", "raylet", *sorted(str(path) for path in tree.rglob("*.cc")), "-lpthread")
    report, log = tmp_path / "report", tmp_path / "raylet.err"
    # To a file: a pipe's end would only be seen when the profiler is gone too.
    with log.open("w") as errors:
        command = [str(tree / "raylet"), str(report), f"--session_dir={tmp_path}"]
        subprocess.run(command, stdout=errors, stderr=errors, timeout=LIMIT_S, check=True)
    assert (report.exists(), "waiting for nsys" in log.read_text()) == (hooked, hooked), log.read_text()
    assert not hooked or report.read_text() == "whole"
    assert not list(tmp_path.glob("profiler_flush.*.lock"))


def test_the_hooked_files_compile_where_there_is_no_linux(tmp_path: Path) -> None:
    tree = checkout(tmp_path, hooked=True)
    files = [f"src/ray/raylet/{name}.cc" for name in ("worker_pool", "node_manager")]
    compile_in(tree, "-U__linux__", "-fsyntax-only", *files)
