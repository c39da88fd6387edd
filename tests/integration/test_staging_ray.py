"""Pinned staging on real Ray: every rejection, column kind and fault, with the host engine.

The cases run in a process whose Ray is an overlay with the patch, so no patched Ray needs to be installed. Each has a
limit: a deadlock is a failure that names its case, and the process is replaced for the next one.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from staging_cases import REJECTIONS

from repro.procs import ProcessTree
from repro.ray_patches import overlay

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).with_name("staging_cases.py")
LIMIT_S = 120.0


class Worker:
    """A process that runs cases. ``path`` comes first on its PYTHONPATH."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._tree: ProcessTree | None = None

    def run(self, case: str) -> Any:
        """What the case returned; ``AssertionError`` with its traceback, or when it did not end."""
        if self._tree is None:
            self._start()
        assert self._tree and self._tree.root.stdin
        self._tree.root.stdin.write(f"{case}\n".encode())
        self._tree.root.stdin.flush()
        try:
            line = self._answers.get(timeout=LIMIT_S)
        except queue.Empty:
            self.end()
            raise AssertionError(f"{case} had not ended after {LIMIT_S:.0f} s") from None
        if not line:
            self.end()
            raise AssertionError(f"{case} ended its process")
        answer = json.loads(line)
        assert "error" not in answer, answer.get("error")
        return answer["value"]

    def _start(self) -> None:
        receiving, sending = os.pipe()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [self._path, str(ROOT), os.environ.get("PYTHONPATH")])),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        }
        self._tree = ProcessTree(
            [sys.executable, str(CASES), str(sending)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(sending,),
        )
        os.close(sending)
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(receiving, self._answers), daemon=True).start()

    @staticmethod
    def _read(receiving: int, answers: queue.Queue[str]) -> None:
        with open(receiving, encoding="utf-8") as lines:
            for line in lines:
                answers.put(line)
        answers.put("")

    def end(self) -> None:
        if self._tree is not None:
            assert self._tree.root.stdin
            self._tree.root.stdin.close()
            self._tree.end()
            self._tree = None


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(str(overlay(tmp_path_factory.mktemp("ray"), ["pinned-staging"])))
    yield worker
    worker.end()


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(str(overlay(tmp_path_factory.mktemp("ray"), [])))
    yield worker
    worker.end()


def test_without_staging_the_plan_is_stocks(stock: Worker, patched: Worker) -> None:
    expected = stock.run("plan_without_staging")
    stock.end()
    assert expected["plain"]["concurrency"] == 1 and expected["plain"]["in flight"] == 2
    assert "_SingleThreadedWrapper" in expected["plain"]["UDF bases"]
    assert patched.run("plan_without_staging") == expected


def test_staging_sets_threads_and_tasks_in_flight(patched: Worker) -> None:
    assert patched.run("plan_with_staging") == {"default": [3, 24], "depth 2": [2, 16], "in flight 9": [3, 9]}


def test_strategies_compare_print_and_pickle(patched: Worker) -> None:
    patched.run("compare_and_pickle")


@pytest.mark.parametrize("kind", REJECTIONS)
def test_rejected(patched: Worker, kind: str) -> None:
    assert REJECTIONS[kind] in patched.run(f"rejection {kind}")


@pytest.mark.parametrize(("batch_size", "blocks"), [(None, 4), (10, 3), (1, 1), (200, 5)])
def test_columns_of_every_kind(patched: Worker, batch_size: int | None, blocks: int) -> None:
    assert len(patched.run(f"columns {json.dumps([batch_size, blocks])}")["columns"]) == 14


def test_an_error_of_the_udf_looks_as_without_staging(patched: Worker) -> None:
    chains = patched.run("udf_error")
    assert chains["staged"] == chains["stock"]
    assert chains["staged"] == [
        "RayTaskError(UserCodeException): ValueError: bad row",
        "RayTaskError(UserCodeException): ray.exceptions.UserCodeException: UDF failed to process a data block.",
    ]


@pytest.mark.parametrize("method", ["copy_h2d", "copy_d2h"])
def test_an_error_of_the_engine_is_a_staging_error(patched: Worker, method: str) -> None:
    chain = patched.run(f"engine_error {method}")
    assert any("PinnedStagingError" in one and f"OSError: {method} failed" in one for one in chain), chain
    assert not any("UserCodeException" in one for one in chain), chain


def test_results_are_right_where_pinning_fails(patched: Worker) -> None:
    stats = patched.run("pinning_fails")
    assert (stats["batches"], stats["pinned_bytes"], stats["fallback"]) == (8, 0, "OSError: pin failed")


def test_an_actor_that_dies_is_restarted(patched: Worker) -> None:
    assert patched.run("actor_dies") == [2 * i for i in range(40)]


def test_pinned_memory_is_freed_at_the_end(patched: Worker) -> None:
    assert patched.run("memory_is_freed") == [{"closed": 0}] * 2


def test_batches_are_staged_while_the_udf_runs(patched: Worker) -> None:
    seen = patched.run("overlap")
    assert seen["batches"] == 12 and seen["serial"]
    assert seen["staged during another call"] >= 6, seen
