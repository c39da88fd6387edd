"""Time and peak memory of an analysis, beside nsys and nsys-ai, and of the ways to read the file.

    python benchmarks/analysis_bench.py [--sizes 1e5,1e6,1e7] [--repeats 2] [--only NAME,...] [--keep DIR]

Makes a profile of N kernels, N runtime calls and N/50 copies a size, runs every contender on it in a fresh process,
contenders in turn, and prints the best wall time and the highest peak memory of the repeats. Contenders whose
software is missing are named with the reason. nsys-ai's cache needs DuckDB's sqlite_scanner extension, which it
downloads; without a network put it under ~/.duckdb/extensions first (README.md).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from repro.nsysdb import schema  # noqa: E402
from repro.nsysdb.model import Capture, Kernel, RuntimeCall  # noqa: E402
from repro.nsysdb.writer import write_profile  # noqa: E402

LIMIT_S = 300
SELECT = f'SELECT start, "end", deviceId FROM {schema.KERNEL}'

# Name -> (what it is, the child's program; PROFILE stands for the file). The analyses first, then readers alone.
ANALYSES = {
    "kit": ("repro.analysis.analyze", "from repro.analysis import analyze\nanalyze(PROFILE, with_nsys_ai=False)"),
    "nsys": ("nsys analyze -r gpu_gaps", ""),
    "nsys-ai cold": (
        "nsys-ai gpu_idle_gaps, building its cache",
        "import shutil\nfrom nsys_ai import parquet_cache\nparquet_cache.invalidate_cache(PROFILE)\n"
        "from nsys_ai.skills.registry import get_skill\n"
        "get_skill('gpu_idle_gaps').execute(parquet_cache.open_cached_db(PROFILE), device=0)",
    ),
    "nsys-ai warm": (
        "nsys-ai gpu_idle_gaps, cache built before",
        "from nsys_ai import parquet_cache\nfrom nsys_ai.skills.registry import get_skill\n"
        "get_skill('gpu_idle_gaps').execute(parquet_cache.open_cached_db(PROFILE), device=0)",
    ),
}
READERS = {
    "pages": (
        "b-tree pages with numpy (repro.nsysdb.pages)",
        "import sqlite3\nfrom pathlib import Path\nfrom repro.nsysdb import pages\n"
        f"find = \"SELECT rootpage FROM sqlite_master WHERE name = '{schema.KERNEL}'\"\n"
        "root = sqlite3.connect(PROFILE).execute(find).fetchone()[0]\n"
        "columns = pages.read_columns(Path(PROFILE), root, [0, 1, 2])",
    ),
    "fromiter": (
        "sqlite3 and np.fromiter",
        "import sqlite3, numpy\nfrom itertools import chain\n"
        f"rows = chain.from_iterable(sqlite3.connect(PROFILE).execute('{SELECT}'))\n"
        "columns = numpy.fromiter(rows, numpy.int64).reshape(-1, 3).T",
    ),
    "fetchall": (
        "sqlite3 fetchall and np.array",
        f"import sqlite3, numpy\ncolumns = numpy.array(sqlite3.connect(PROFILE).execute('{SELECT}').fetchall()).T",
    ),
    "connectorx": (
        "connectorx to Arrow",
        f"import connectorx\ntable = connectorx.read_sql('sqlite://' + PROFILE, '{SELECT}', return_type='arrow')\n"
        "columns = [column.to_numpy() for column in table.columns]",
    ),
    "adbc": (
        "ADBC to Arrow",
        "import adbc_driver_sqlite.dbapi as adbc\ncursor = adbc.connect(PROFILE).cursor()\n"
        f"cursor.execute('{SELECT}')\ncolumns = [column.to_numpy() for column in cursor.fetch_arrow_table().columns]",
    ),
    "duckdb": (
        "DuckDB sqlite_scanner",
        "import duckdb\ndb = duckdb.connect()\ndb.execute('LOAD sqlite')\n"
        f'columns = list(db.execute("SELECT start, \\"end\\", deviceId FROM sqlite_scan(\'" + PROFILE + "\', '
        f"'{schema.KERNEL}')\").fetchnumpy().values())",
    ),
}


def make_profile(path: Path, kernels: int) -> None:
    """Two streams of kernels of 3 to 9 us every 10 us, with 2 ms of nothing after a thousand, a runtime call each, and
    copies to and from the GPU. Without gaps of 1 ms nsys-ai would stop early."""
    seed = Capture(
        0,
        "benchmark",
        kernels=[Kernel(1, 2, 7, 1, 100, "gemm")],
        runtime_calls=[RuntimeCall(1, 2, 100, 100, 1, "cudaLaunchKernel_v7000")],
    )
    write_profile(path, seed)
    with closing(sqlite3.connect(path)) as db:
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-200000"):
            db.execute(f"PRAGMA {pragma}")
        at = "1000000000 + x * 10000 + x / 1000 * 2000000"
        end = f"{at} + 3000 + (x * 7919) % 6000"
        of_kernel = {"start": at, "end": end, "streamId": "7 + x % 2", "correlationId": "x", "gridId": "x"}
        of_call = {"start": f"{at} - 6000", "end": f"{at} - 2000", "correlationId": "x"}
        for table, values in ((schema.KERNEL, of_kernel), (schema.RUNTIME, of_call)):
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            chosen = ", ".join(values.get(column, f'seed."{column}"') for column in columns)
            db.execute(
                f"WITH RECURSIVE s(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM s WHERE x < {kernels}) "
                f"INSERT INTO {table} SELECT {chosen} FROM s CROSS JOIN (SELECT * FROM {table} LIMIT 1) seed"
            )
            db.execute(f"DELETE FROM {table} WHERE rowid = 1")
        db.execute(
            f"INSERT INTO {schema.MEMCPY} (start, end, deviceId, contextId, streamId, correlationId, globalPid, bytes, "
            "copyKind, srcKind, dstKind) SELECT start - 4000, start - 500, 0, 1, 9, correlationId + 100000000, "
            "globalPid, 1 << 20, 1 + gridId / 50 % 2, gridId / 50 % 2 * 2, 2 - gridId / 50 % 2 * 2 "
            f"FROM {schema.KERNEL} WHERE gridId % 50 = 0"
        )
        db.commit()


def command(name: str, path: Path) -> list[str]:
    if name == "nsys":
        return ["nsys", "analyze", "--quiet", "-r", "gpu_gaps", str(path)]
    program = (ANALYSES | READERS)[name][1]
    return [sys.executable, "-c", f"PROFILE = {str(path)!r}\n{program}"]


def run(name: str, path: Path) -> tuple[float, float] | str:
    """(wall seconds, peak MB) of one run in a process of its own, the largest of its processes; or why it failed."""
    if name == "nsys" and not shutil.which("nsys"):
        return "no nsys on PATH"
    with tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        child = subprocess.Popen(
            ["timeout", str(LIMIT_S), *command(name, path)],
            stdout=said,
            stderr=said,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        _, status, usage = os.wait4(child.pid, 0)
        wall_s = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            said.seek(0)
            lines = [line for line in said.read().decode("utf-8", "replace").splitlines() if line.strip()]
            return f"status {child.returncode}: {lines[-1] if lines else 'no output'}"
    return wall_s, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1e5,1e6,1e7")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", default="", help="contenders, comma separated")
    parser.add_argument("--keep", type=Path, help="keep profiles here and use those that lie here")
    options = parser.parse_args()
    contenders = ANALYSES | READERS
    names = options.only.split(",") if options.only else list(contenders)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="analysis-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for size in (int(float(text)) for text in options.sizes.split(",")):
            path = folder / f"{size}.sqlite"
            if not path.exists():
                make_profile(path, size)
            print(f"\n{size} kernels, {path.stat().st_size / 1e6:.0f} MB\n")
            print("| contender | what | best s | peak MB | times the kit |\n|---|---|---|---|---|")
            best: dict[str, tuple[float, float]] = {}
            why: dict[str, str] = {}
            for _ in range(options.repeats):
                for name in names:
                    if name in why:
                        continue
                    got = run(name, path)
                    if isinstance(got, str):
                        why[name] = got
                    else:
                        wall_s, peak_mb = best.get(name, (got[0], 0.0))
                        best[name] = min(wall_s, got[0]), max(peak_mb, got[1])
            base = best.get("kit", (float("nan"), 0.0))[0]
            for name in names:
                if name in best:
                    wall_s, peak_mb = best[name]
                    ratio = f"{wall_s / base:.1f}" if name in ANALYSES else ""
                    print(f"| {name} | {contenders[name][0]} | {wall_s:.2f} | {peak_mb:.0f} | {ratio} |", flush=True)
                else:
                    print(f"| {name} | {contenders[name][0]} | not run: {why[name]} | | |", flush=True)
    finally:
        if not options.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
