"""A cluster of several raylets that others started: the GPU stage runs where the GPU is, its files come from there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from repro.nsysdb.reader import read_profile
from repro.results import RunDir

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 280.0

# A process of its own, so that this one stays free of Ray. The GPU is one that Ray is told of.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "object_store_memory": 300 << 20})
node = cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=300 << 20)
print(cluster.address, node.unique_id, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, str]]:
    """(address of a cluster, address of its node with a GPU)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    # Ray's agents load the nsight plugin when they start, so a node's Ray must be patched before.
    subprocess.run([sys.executable, "-m", "repro", "patches", "apply"], env=environment, check=True, timeout=120)
    with tempfile.TemporaryDirectory(prefix="ra-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            env={**environment, "RAY_TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin
        assert process.stdout
        try:
            address, node = process.stdout.readline().split()
            yield address, node
        finally:
            process.stdin.close()
            process.wait(timeout=60)


def reproduce(cluster: tuple[str, str], folder: Path, *flags: str) -> tuple[subprocess.CompletedProcess[str], RunDir]:
    command = [sys.executable, "-m", "repro", "reproduce", f"--address={cluster[0]}", "--out=run", *flags]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done, RunDir(folder / "run")


SMALL = ("--device=emulated", "--profiles=split", "--blocks=4", "--prep-ms=5", "--payload=64")


@pytest.mark.timeout(600)
def test_the_stage_runs_on_the_node_with_the_gpu(cluster: tuple[str, str], tmp_path: Path) -> None:
    done, run = reproduce(cluster, tmp_path, *SMALL)
    assert done.returncode in (0, 1), done.stderr
    (capture,) = run.read().captures
    assert capture.checksum
    assert capture.checksum.ok
    assert capture.extra["node_gpus"] == 1
    assert len(capture.extra["reports_found"]) == 1
    assert len(read_profile(run.profile_path("split")).kernels) == 4 * 9


@pytest.mark.needs("nsys")
@pytest.mark.timeout(600)
def test_reports_of_nsys_are_fetched_from_that_node(cluster: tuple[str, str], tmp_path: Path) -> None:
    done, run = reproduce(cluster, tmp_path, *SMALL, "--profiler=nsys")
    assert done.returncode == 4, done.stderr
    (capture,) = run.read().captures
    assert capture.nsys_rep
    assert (run.root / capture.nsys_rep).stat().st_size > 0
    assert sorted(Path(name).suffix for name in capture.extra["reports_found"]) == [".jsonl", ".nsys-rep"]


@pytest.mark.timeout(300)
def test_a_cluster_is_not_reached(tmp_path: Path) -> None:
    done, run = reproduce(("127.0.0.1:1", ""), tmp_path, *SMALL)
    assert done.returncode not in (0, 4)
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
    assert not run.profile_path("split").exists()
