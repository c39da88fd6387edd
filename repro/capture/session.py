"""One Ray cluster for a run: the kit's end of the driver process.

    with Session(cpus=2) as session:
        session.start()
        ran = session.run(plan)

Every request has a limit that names what it waited for. Leaving the block ends the cluster, by pid.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

import repro
from repro import ray_patches
from repro.capture.messages import (
    Answer,
    Batches,
    Failed,
    Measure,
    Measured,
    Ran,
    Request,
    Run,
    Start,
    Started,
    parse_answer,
)
from repro.errors import KitError, MachineError, WaitTimeoutError
from repro.procs import ProcessTree
from repro.workload.calibrate import GpuRequest
from repro.workload.plan import COMPUTE_BOUND_PREP_TASKS, WorkloadPlan

START_LIMIT_S = 90.0
MEASURE_LIMIT_S = 90.0
STALL_LIMIT_S = 150.0
"""A pipeline that yields no batch for this long is stuck."""

OBJECT_STORE_BYTES = 2 << 30

_LOGS = "The logs of Ray and its driver are kept in the run's logs folder."

_A = TypeVar("_A", Started, Measured, Ran)


class DriverFailedError(KitError):
    """The driver process reported an error, or answered another request; it ends with the error's exit status."""


class Session:
    """The cluster's driver and what it keeps on disk until the run ends: Ray's temp dir, device logs, its own log.

    With ``stock_ray`` Ray comes from a copy without the kit's patches, whatever this environment's Ray has.
    ``argv`` replaces the driver in tests. The folder is short-lived and short-named: Ray puts sockets into it
    whose paths may not exceed 107 bytes.
    """

    def __init__(
        self,
        *,
        cpus: int,
        device: Literal["emulated", "cuda"] = "emulated",
        stock_ray: bool = False,
        object_store_bytes: int = OBJECT_STORE_BYTES,
        address: str | None = None,
        argv: list[str] | None = None,
    ) -> None:
        self._cpus = cpus
        self._device = device
        self._object_store_bytes = object_store_bytes
        self._stock_ray = stock_ray
        self._address = address
        self._argv = argv or [sys.executable, "-m", "repro.capture.driver"]
        self._pending = b""

    def __enter__(self) -> Session:
        self.folder = Path(tempfile.mkdtemp(prefix="repro-"))
        self.driver_log = self.folder / "driver.log"
        receiving, sending = os.pipe()
        try:
            environment = _environment(self._cpus)
            if self._stock_ray:
                overlay = ray_patches.overlay(self.folder / "stock", [])
                environment["PYTHONPATH"] = os.pathsep.join([str(overlay), environment["PYTHONPATH"]])
            with self.driver_log.open("wb") as log:
                self._tree = ProcessTree(
                    [*self._argv, str(sending)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(sending,),
                )
        except BaseException:
            os.close(receiving)
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        finally:
            os.close(sending)
        self._answers = receiving
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._tree.end(grace_s=10.0)
        finally:
            os.close(self._answers)
            if self._tree.root.stdin:
                with suppress(BrokenPipeError):  # a request that a driver which had ended did not take
                    self._tree.root.stdin.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> Started:
        """Start the cluster (or join it)."""
        what = f"the Ray cluster at {self._address}" if self._address else "Ray to start"
        request = Start(
            device=self._device,
            cpus=self._cpus,
            temp_dir=str(self.folder / "ray"),
            object_store_bytes=self._object_store_bytes,
            address=self._address,
        )
        return self._ask(request, Started, what, START_LIMIT_S)

    def measure(self, gpu: GpuRequest | None = None) -> Measured:
        """Measure the object store, and calibrate the GPU if asked for."""
        what = "the object store measurement" + (" and the calibration of the GPU" if gpu else "")
        return self._ask(Measure(gpu=gpu), Measured, what, MEASURE_LIMIT_S * (2 if gpu else 1))

    def run(self, plan: WorkloadPlan, on_batch: Callable[[int], None] = lambda received: None) -> Ran:
        """Run one pipeline. The limit is on the time without a batch, not on the whole."""
        total = plan.warmup_blocks + plan.blocks
        limit_s = STALL_LIMIT_S + 10 * (plan.prep.cpu_ms + plan.interval_ms) / 1e3
        request = Run(plan=plan, fetch_to=str(self.folder))
        return self._ask(request, Ran, f"the next of {total} batches of {plan.mode}", limit_s, on_batch)

    def keep_logs(self, destination: Path) -> None:
        """Copy Ray's and the driver's logs to ``destination``."""
        destination.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self.driver_log, destination)
        for logs in self.folder.glob("ray/session_2*/logs"):
            shutil.copytree(logs, destination / logs.parent.name, dirs_exist_ok=True, ignore_dangling_symlinks=True)

    def _ask(
        self,
        request: Request,
        kind: type[_A],
        what: str,
        limit_s: float,
        on_batch: Callable[[int], None] = lambda received: None,
    ) -> _A:
        assert self._tree.root.stdin
        try:
            self._tree.root.stdin.write(request.model_dump_json().encode() + b"\n")
            self._tree.root.stdin.flush()
        except BrokenPipeError:
            raise self._ended(what) from None
        while True:
            answer = self._next_answer(what, limit_s)
            if isinstance(answer, Batches):
                on_batch(answer.received)
            elif isinstance(answer, Failed):
                error = DriverFailedError(
                    f"Waiting for {what}, the driver of the Ray cluster failed: {answer.message}.",
                    remedy=answer.remedy or _LOGS,
                )
                error.exit_status = answer.exit_status
                raise error
            elif isinstance(answer, kind):
                return answer
            else:
                raise DriverFailedError(f"Waiting for {what}, the driver answered with {answer.kind!r}.", remedy=_LOGS)

    def _next_answer(self, what: str, limit_s: float) -> Answer:
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WaitTimeoutError(f"Waited {limit_s:.0f} s for {what}.", remedy=_LOGS)
                chunk = os.read(self._answers, 1 << 16)
                if not chunk:
                    raise self._ended(what)
                self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return parse_answer(line)

    def _ended(self, what: str) -> MachineError:
        try:
            status: int | None = self._tree.root.wait(timeout=5)
        except subprocess.TimeoutExpired:
            status = None
        lines = self.driver_log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["(no output)"]
        return MachineError(
            f"Waiting for {what}, the driver of the Ray cluster ended with status {status}: {lines[-1]}", remedy=_LOGS
        )


def _environment(cpus: int) -> dict[str, str]:
    """The driver's environment: the caller's, without what would lead Ray elsewhere or on the network."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    package_parent = str(Path(repro.__file__).resolve().parent.parent)
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")])),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        # glibc gives batches back to the kernel and pays for fresh pages at each one; keep them instead.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
        "OMP_NUM_THREADS": "1",
        # When a worker ends, Ray kills its process group, and in some versions of nsys that is nsys's own, which is
        # then writing the report (ray#60904). The kit ends what is left of a session itself.
        "RAY_process_group_cleanup_enabled": "0",
        # Ray ends idle workers above this number; the warm ones of all prep tasks and the next actor must stay.
        "RAY_num_workers_soft_limit": str(4 * max(cpus, COMPUTE_BOUND_PREP_TASKS)),
    }
    return environment
