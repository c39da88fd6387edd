"""The driver process of a run's Ray cluster: ``python -m repro.capture.driver ANSWER_FD``.

A process of its own, so that the kit can end it whatever Ray is doing, so that Ray's output has a file to go to, and
so that RAY_ADDRESS or an earlier ``ray.init`` of the caller have no part in it. See ``repro.capture.messages``.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO

from repro.capture import collect, placement
from repro.capture.messages import (
    Answer,
    Batches,
    Failed,
    Measure,
    Measured,
    Ran,
    Request,
    Run,
    StageNode,
    Start,
    Started,
    parse_request,
)
from repro.errors import KitError
from repro.probes import Cuda, cuda_devices
from repro.workload import graph
from repro.workload.plan import WorkloadPlan


class Driver:
    """Answers requests one at a time. ``answers`` takes one JSON object a line."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers
        self._stage_node = StageNode(node_id="", address="", gpus=0)
        self._joined = False

    def handle(self, request: Request) -> None:
        """Answer ``request``; whatever it raises is answered as ``Failed``."""
        try:
            if isinstance(request, Start):
                self._send(self._start(request))
            elif isinstance(request, Measure):
                gpu = placement.calibrate_gpu(self._stage_node, request.gpu) if request.gpu else None
                self._send(Measured(store_ms_per_mib=graph.measure_store(), gpu=gpu))
            else:
                self._send(self._run(request))
        except Exception as error:
            traceback.print_exc()  # into the driver's log, which a failed run keeps
            self._send(_failed(error))

    def _send(self, answer: Answer) -> None:
        self._answers.write(answer.model_dump_json() + "\n")
        self._answers.flush()

    def _start(self, request: Start) -> Started:
        import ray

        self._joined = bool(request.address)
        if request.address:
            ray.init(
                address=request.address,
                log_to_driver=False,
                configure_logging=False,
                runtime_env=placement.cluster_environment(),
            )
        else:
            ray.init(
                address="local",
                num_cpus=request.cpus,
                num_gpus=_gpus() if request.device == "cuda" else None,
                object_store_memory=request.object_store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                _temp_dir=request.temp_dir,
                _node_ip_address="127.0.0.1",
            )
        graph.configure_ray_data()
        self._stage_node = placement.choose_stage_node(request.device)
        return Started(node=str(ray.get_runtime_context().get_node_id()), stage_node=self._stage_node)

    def _run(self, request: Run) -> Ran:
        plan = request.plan
        graph.warm_up(plan)
        started_ns = time.monotonic_ns()
        received = 0

        def on_batch(number: int) -> None:
            nonlocal received
            received = number
            self._send(Batches(received=number))

        try:
            results = graph.run(plan, on_batch, placement.stage_options(plan, self._stage_node))
        except Exception as error:
            if received or plan.profiler != "nsys":
                raise
            raise placement.no_worker_error(error) from error
        verified = graph.verify(plan, results.sums)
        timing = graph.timing(plan, results.calls)
        files: list[Path] = []
        if plan.profiler != "emulated" or self._joined:
            node = collect.RemoteNode(self._stage_node.node_id)
            reports = collect.wait_for_reports(node, plan.stem, on_progress=lambda: on_batch(received))
            files = collect.fetch(node, reports, Path(request.fetch_to))
        return Ran(
            opening_ms=_opening_ms(plan, results.calls),
            files=[str(file) for file in files],
            expected=f"{verified.expected:#018x}",
            got=f"{verified.got:#018x}",
            wrong=verified.wrong,
            opened_ns=timing.opened_ns,
            closed_ns=timing.closed_ns,
            wall_s=timing.wall_s,
            # Of one machine both are the monotonic clock; of two they cannot be compared.
            warmup_s=None if self._joined else (timing.opened_ns - started_ns) / 1e9,
            wait_ms=timing.wait_ms,
            call_ms=timing.call_ms,
            prep_ms=timing.prep_ms,
            producer_bound=timing.producer_bound,
        )


def _failed(error: Exception) -> Failed:
    if isinstance(error, KitError):
        return Failed(message=error.message.removesuffix("."), remedy=error.remedy, exit_status=error.exit_status)
    summary = str(error).strip().splitlines() or [""]
    return Failed(message=f"{type(error).__name__}: {summary[0]}")


def _gpus() -> int | None:
    """GPUs that CUDA shows; Ray's own count needs NVML, which can fail where CUDA works."""
    found = cuda_devices()
    return len(found.names) if isinstance(found, Cuda) else None


def _opening_ms(plan: WorkloadPlan, calls: list[graph.Call]) -> float:
    """From the end of the last warm-up call to the start of the window."""
    before = [call.end_ns for call in calls if call.call < plan.warmup_blocks]
    opened = [call.start_ns for call in calls if call.call >= plan.warmup_blocks]
    return max(0, min(opened) - max(before, default=min(opened))) / 1e6


def _read_requests(requests: queue.Queue[Request | None]) -> None:
    """Put every request into the queue; at end of file stop the process, in mid-run too."""
    for line in sys.stdin:
        requests.put(parse_request(line))
    requests.put(None)
    os.kill(os.getpid(), signal.SIGTERM)


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    signal.signal(signal.SIGTERM, _stop)
    requests: queue.Queue[Request | None] = queue.Queue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    try:
        with open(int(sys.argv[1]), "w", encoding="utf-8") as answers:
            driver = Driver(answers)
            while (request := requests.get()) is not None:
                driver.handle(request)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        import ray

        ray.shutdown()


if __name__ == "__main__":
    main()
