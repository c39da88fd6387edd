"""The compute-bound pair captured on a Ray with the pinned-staging patch: right results, honest records."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro.analysis import analyze
from repro.procs import running
from repro.ray_patches import overlay
from repro.results import RunDir

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0
PROGRAM = """
import sys
from pathlib import Path
from repro.capture.run import capture_run
from repro.progress import Progress
from repro.results import RunDir
from repro.spec import RunSpec

pair = ("compute_split", "compute_staged")
shape = {"blocks": 6, "prep_ms": 5, "rows": 256, "cols": 1024, "payload": int(sys.argv[2])}
spec = RunSpec(profiles=pair, device="emulated", stock_ray=sys.argv[3] == "stock", **shape)
capture_run(spec, RunDir(Path(sys.argv[1])), fresh=True, progress=Progress(quiet=True))
"""


def capture(tmp_path: Path, payload: int, ray: str) -> RunDir:
    """A run on a copy of the installed Ray, which the run patches (or not, with ``ray`` ``stock``)."""
    path = overlay(tmp_path / "ray", [])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), str(payload), ray]
    with running(argv, env=environment, stderr=subprocess.PIPE, text=True) as tree:
        _, errors = tree.root.communicate(timeout=LIMIT_S)
    assert tree.root.returncode == 0, errors
    return RunDir(tmp_path / "run")


@pytest.mark.parametrize("payload", [256, 32])
def test_the_pair_is_captured(tmp_path: Path, payload: int) -> None:
    run = capture(tmp_path, payload, "patched")
    split, staged = run.read().captures
    for one in (split, staged):
        assert one.error is None and one.skipped is None
        assert one.checksum and one.checksum.ok
        assert one.batches == 6 and one.batch_wait_ms is not None
    assert split.staging is None
    assert staged.staging and staged.staging.fallback is None
    assert staged.staging.slots == 16
    # 6 batches, two host copies each, charged at the model's 8.5 GB/s of the nominal size.
    assert staged.staging.host_copy_ms >= 0.9 * 6 * 2 * 256 * 1024 * 4 / 8.5e6
    before, after = (analyze(run.root / str(one.file), with_nsys_ai=False) for one in (split, staged))
    assert before.kernels == after.kernels == 6 * 9
    assert before.h2d.bytes == 6 * 256 * 1024 * 4 and before.h2d.pageable_pct == 100
    assert after.h2d.pageable_pct == 0 and after.d2h.pageable_pct == 0
    assert after.d2h.bytes >= 5 * 256 * 1024 * 4, "the last batch may come back after the window"


def test_on_a_stock_ray_the_staged_profile_is_skipped_with_the_reason(tmp_path: Path) -> None:
    split, staged = capture(tmp_path, 32, "stock").read().captures
    assert split.checksum and split.checksum.ok
    assert staged.skipped == "needs the pinned-staging patch of Ray, and this run is on a stock Ray (--stock-ray)"
