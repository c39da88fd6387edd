"""The flush window's source patch on made-up trees that hold Ray's anchors."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from repro.errors import InputError
from repro.ray_patches import flush_source


def checkout(root: Path) -> Path:
    """A tree with every anchor once, between lines of no importance."""
    for file in {hook.file for hook in flush_source.HOOKS}:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        anchors = [hook.anchor.rstrip("\n") for hook in flush_source.HOOKS if hook.file == file]
        path.write_text("\n".join(["// first", *anchors, "// last"]) + "\n")
    return root


def files(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_every_hook_and_every_new_file_is_applied(tmp_path: Path) -> None:
    tree = checkout(tmp_path)
    written = flush_source.apply(tree)
    assert sorted(written) == sorted(files(tree))
    node_manager = (tree / "src/ray/raylet/node_manager.cc").read_text()
    assert "SignalTargetsInstead(saved_pgid, sig)" in node_manager
    assert node_manager.index("WaitForAllWindows") < node_manager.index("object_manager_.Stop()")
    assert "OnWorkerRegistered(pid)" in (tree / "src/ray/raylet/worker_pool.cc").read_text()
    core = (tree / "src/ray/raylet/profiler_flush/flush_window.cc").read_text()
    assert '#include "ray/raylet/profiler_flush/flush_window.h"' in core
    assert '#include "flush_window.h"' not in core


def test_the_new_files_include_nothing_that_is_left_behind(tmp_path: Path) -> None:
    flush_source.apply(checkout(tmp_path))
    for path, text in files(tmp_path).items():
        for line in text.splitlines():
            if line.startswith('#include "ray/raylet/profiler_flush/'):
                assert (tmp_path / "src" / line.split('"')[1]).exists(), f"{path}: {line}"


def test_the_diff_is_what_apply_writes_and_git_takes_it_back(tmp_path: Path) -> None:
    by_git, by_us = checkout(tmp_path / "git"), checkout(tmp_path / "us")
    diff = flush_source.diff(by_git)
    before = files(by_git)
    subprocess.run(["git", "apply", "-p1"], cwd=by_git, input=diff, check=True)
    flush_source.apply(by_us)
    assert files(by_git) == files(by_us)
    subprocess.run(["git", "apply", "-p1", "-R"], cwd=by_git, input=diff, check=True)
    assert files(by_git) == before


@pytest.mark.parametrize("hook", flush_source.HOOKS, ids=lambda hook: f"{Path(hook.file).name}-{hook.anchor[:20]!r}")
@pytest.mark.parametrize("times", [0, 2])
def test_an_anchor_that_is_not_there_once_stops_everything(tmp_path: Path, hook: flush_source.Hook, times: int) -> None:
    tree = checkout(tmp_path)
    path = tree / hook.file
    path.write_text(path.read_text().replace(hook.anchor, hook.anchor * times))
    before = files(tree)
    with pytest.raises(InputError, match=f"is there {times} times"):
        flush_source.apply(tree)
    assert files(tree) == before


def test_a_second_time_is_refused(tmp_path: Path) -> None:
    tree = checkout(tmp_path)
    flush_source.apply(tree)
    with pytest.raises(InputError, match="is there already"):
        flush_source.apply(tree)


def test_not_a_checkout_of_ray(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        flush_source.diff(tmp_path)


def test_the_command(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    tree = checkout(tmp_path)
    assert flush_source.main(["diff", str(tree)]) == 0
    assert capsysbinary.readouterr().out == flush_source.diff(tree)
    assert flush_source.main(["print"]) == 2
    assert b"usage:" in capsysbinary.readouterr().err
