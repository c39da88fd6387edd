"""Do the four modes come out in the published order on this machine? ``python benchmarks/modes_bench.py --rounds 5``

A round is a whole run of inline, split, pinned and overlap with a cluster of its own, as ``reproduce`` does it; with
``--all`` of all seven profiles, which is a default run. Prints idle a mode and round, the ratio to split in the same
round, and whether the order is the published one: inline > pinned >= split > overlap. Ends with status 1 if a round has
another. Captures put the patches on the environment's Ray, as ``reproduce`` does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from repro.analysis import analyze
from repro.capture import capture_run
from repro.progress import Progress
from repro.results import RunDir
from repro.spec import PUBLISHED, RunSpec

MODES = ("inline", "pinned", "split", "overlap")


def one_round(profiles: tuple[str, ...], payload: str, blocks: int) -> tuple[dict[str, float], float]:
    """(idle in percent a captured profile, wall time in s) of one run in a fresh folder."""
    with tempfile.TemporaryDirectory(prefix="modes-bench-") as folder:
        run = RunDir(Path(folder))
        spec = RunSpec(
            profiles=profiles,
            device="emulated",
            blocks=blocks,
            payload=payload if payload in ("auto", "full") else int(payload),
        )
        started = time.monotonic()
        record = capture_run(spec, run, fresh=True, progress=Progress(quiet=True))
        wall_s = time.monotonic() - started
        idle = {
            one.profile: analyze(run.root / one.file, with_nsys_ai=False).idle_pct
            for one in record.captures
            if one.file
        }
        if record.payload:
            print(f"  {record.payload.travelled_rows} rows travel: {record.payload.reason}", flush=True)
    return idle, wall_s


def in_published_order(idle: dict[str, float]) -> bool:
    return idle["inline"] > idle["pinned"] >= idle["split"] > idle["overlap"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--payload", default="auto")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--all", action="store_true", help="the seven published profiles")
    options = parser.parse_args()
    good = 0
    for number in range(1, options.rounds + 1):
        profiles = PUBLISHED if options.all else ("inline", "split", "pinned", "overlap")
        idle, wall_s = one_round(profiles, options.payload, options.blocks)
        good += in_published_order(idle)
        shown = "  ".join(f"{mode} {idle[mode]:.1f}% ({idle[mode] / idle['split']:.2f} x split)" for mode in MODES)
        order = "published order" if in_published_order(idle) else "another order"
        print(f"round {number}: {shown}  {order}, {wall_s:.1f} s", flush=True)
        if options.all:
            others = "  ".join(f"{name} {value:.1f}%" for name, value in idle.items() if name not in MODES)
            print(f"  {others}", flush=True)
    print(f"{good} of {options.rounds} rounds in the published order")
    return 0 if good == options.rounds else 1


if __name__ == "__main__":
    sys.exit(main())
