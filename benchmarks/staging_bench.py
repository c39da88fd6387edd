#!/usr/bin/env python3
"""What pinned staging gains on the emulated device: paired captures, staged beside not staged, in one run.

Cases: ``producer-bound``, the final pair as published (a batch every 104 ms); ``compute-bound``, the same pipeline fed
by a second CPU operator; ``20 ms``, compute-bound with five matmuls instead of nine (21.7 ms). Both sides of a pair run
the same pipeline with the same tasks in flight. On a machine of two cores a prep of 40 ms cannot feed a stage of
39 ms, so the compute-bound cases prepare for ``--prep-ms`` (10) a batch and let ``--payload`` (64) rows travel; the
copies are accounted, and the host copies charged, at the nominal 64 MiB all the same.

A line is a pair; the figures are medians over the repeats, ratios medians of the pairs' own ratios. ``host copy`` is
time spent in staging threads: copying that moved there. ``wait`` is idle time without a copy.

    python benchmarks/staging_bench.py [--case NAME] [--repeats 3] [--blocks 32]

Needs no patched Ray: without one the script starts itself again on an overlay.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from repro import ray_patches  # noqa: E402
from repro.analysis import Analysis, analyze  # noqa: E402
from repro.capture.run import capture_run  # noqa: E402
from repro.progress import Progress  # noqa: E402
from repro.results import CaptureRecord, RunDir  # noqa: E402
from repro.spec import RunSpec  # noqa: E402

PATCH = "pinned-staging"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["producer-bound", "compute-bound", "20 ms"], action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--prep-ms", type=float, default=10.0)
    parser.add_argument("--payload", type=int, default=64)
    arguments = parser.parse_args()
    if not any(one.patch.name == PATCH and one.state == "applied" for one in ray_patches.status().patches):
        with tempfile.TemporaryDirectory(prefix="staging-bench-") as folder:
            path = ray_patches.overlay(Path(folder) / "ray", [PATCH])
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
            return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
    print(
        f"{'':15} {'copy_ms':>17} {'idle_ms':>17} {'wait ms':>13} {'idle %':>13} {'H2D overlapped':>15} "
        f"{'batches/s':>11} {'host copy':>9}"
    )
    fed: dict[str, Any] = {"prep_ms": arguments.prep_ms, "payload": arguments.payload}
    for case, pair, changes in (
        ("producer-bound", ("final_split", "final_staged"), {}),
        ("compute-bound", ("compute_split", "compute_staged"), fed),
        ("20 ms", ("compute_split", "compute_staged"), {**fed, "matmuls": 5}),
    ):
        if arguments.case and case not in arguments.case:
            continue
        spec = RunSpec(profiles=pair, device="emulated", repeats=arguments.repeats, blocks=arguments.blocks, **changes)
        with tempfile.TemporaryDirectory(prefix="staging-bench-") as folder:
            run = RunDir(Path(folder) / "run")
            captures = capture_run(spec, run, fresh=False, progress=Progress(quiet=True)).captures
            found = {name: [_figures(run, one) for one in captures if one.profile == name] for name in pair}
        print(_line(case, *found.values()), flush=True)
    return 0


def _figures(run: RunDir, capture: CaptureRecord) -> tuple[Analysis, CaptureRecord]:
    assert capture.file
    return analyze(run.root / capture.file, with_nsys_ai=False), capture


def _line(case: str, before: list[tuple[Analysis, CaptureRecord]], after: list[tuple[Analysis, CaptureRecord]]) -> str:
    def both(figure: str) -> tuple[float, float]:
        sides = [[getattr(analysis, figure) for analysis, _ in side] for side in (before, after)]
        return median(sides[0]), median(sides[1])

    def ratio(figure: str) -> str:
        pairs = zip(before, after, strict=True)
        change = median(getattr(new, figure) / getattr(old, figure) - 1 for (old, _), (new, _) in pairs)
        return "{:.0f} > {:.0f} {:+.0%}".format(*both(figure), change)

    def rate(side: list[tuple[Analysis, CaptureRecord]]) -> float:
        return median((capture.batches or 0) / (capture.wall_s or 1.0) for _, capture in side)

    overlapped = median(analysis.h2d.overlapped_pct or 0.0 for analysis, _ in after)
    host_copy_ms = median(capture.staging.host_copy_ms for _, capture in after if capture.staging)
    return (
        f"{case:15} {ratio('copy_ms'):>17} {ratio('idle_ms'):>17} {'{:.0f} > {:.0f}'.format(*both('wait_ms')):>13} "
        f"{'{:.1f} > {:.1f}'.format(*both('idle_pct')):>13} {overlapped:14.0f}% "
        f"{rate(before):4.1f} > {rate(after):4.1f} {host_copy_ms:6.0f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
