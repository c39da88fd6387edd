"""What the flush-window fix costs where nothing is profiled: paired ray.shutdown() times, stock and fixed.

``python benchmarks/shutdown_bench.py [--pairs=20] [--out=FILE.json]``

Each time is one fresh local cluster that ran one task. The two of a pair run back to back, in alternating order, so
that drift of the machine hits both. The figure is the ratio of the medians, fixed to stock; exit status 1 where it is
above 1.05. Needs g++ and the machine to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from repro.ray_patches import flush_window, overlay

RATIO_LIMIT = 1.05
START_LIMIT_S = 180.0
DRIVER = """
import json, time, ray
ray.init(address="local", include_dashboard=False, num_cpus=2, object_store_memory=256 * 1024**2, log_to_driver=False)
ray.get(ray.remote(lambda: None).remote())
raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
with open(f"/proc/{raylet}/maps") as maps:
    loaded = "libprofiler_flush.so" in maps.read()
start = time.monotonic()
ray.shutdown()
print(json.dumps({"shutdown_s": time.monotonic() - start, "loaded": loaded}))
"""


def shutdown_s(packages: Path, variables: dict[str, str], *, fixed: bool) -> float:
    """Seconds that ``ray.shutdown()`` took in a new driver."""
    env = {**os.environ, **variables, "PYTHONPATH": str(packages)}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], env=env, capture_output=True, text=True, timeout=START_LIMIT_S
    )
    if done.returncode != 0:
        sys.exit(f"a driver failed:\n{done.stderr[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    if result["loaded"] != fixed:
        sys.exit(f"the library is {'' if result['loaded'] else 'not '}in the raylet of the wrong arm")
    return float(result["shutdown_s"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", type=Path, help="also write every time to this file")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"stock": [], "fixed": []}
    with tempfile.TemporaryDirectory() as folder:
        library = flush_window.build(Path(folder) / "build")
        packages = {
            "stock": overlay(Path(folder) / "stock", []),
            "fixed": overlay(Path(folder) / "fixed", ["profiler-flush-wait"]),
        }
        variables = {
            "stock": {},
            "fixed": flush_window.environment(library, ray_dir=packages["fixed"] / "ray"),
        }
        for pair in range(arguments.pairs):
            for arm in ("stock", "fixed") if pair % 2 == 0 else ("fixed", "stock"):
                times[arm].append(shutdown_s(packages[arm], variables[arm], fixed=arm == "fixed"))
            print(f"pair {pair + 1}: stock {times['stock'][-1]:.3f} s, fixed {times['fixed'][-1]:.3f} s", flush=True)
    medians = {arm: statistics.median(values) for arm, values in times.items()}
    ratio = medians["fixed"] / medians["stock"]
    print(f"medians: stock {medians['stock']:.3f} s, fixed {medians['fixed']:.3f} s; ratio {ratio:.3f}")
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"shutdown_s": times, "median_s": medians, "ratio": ratio}, indent=1) + "\n"
        )
    return 0 if ratio <= RATIO_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
