"""The Ray Data graph of one capture, its run, and what its results say.

Needs a Ray that is already connected. ``run`` executes the graph once; results are checked batch by batch as they
arrive and dropped, so a run holds a few batches in memory at a time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from repro.device import cuda, emulated
from repro.device.emulated import checksum
from repro.errors import WaitTimeoutError
from repro.workload import pace, staging
from repro.workload.gpu_stage import STAGES, Batch, labelled
from repro.workload.plan import (
    COMPUTE_BOUND_IN_FLIGHT,
    COMPUTE_BOUND_PREP_TASKS,
    IN_FLIGHT,
    MIN_PREP_TASKS,
    TASK_THREADS,
    WorkloadPlan,
)
from repro.workload.prep import PrepPlan, expected, prepare, walk

ACTOR_START_S = 120
"""For the GPU stage's actor to be up, also under nsys on a busy machine."""
SPARE_WORKERS = 4
"""Warm workers beside those that can run at a time: a task that ends leaves its worker to Ray for a moment, and without
a spare one its successor had a new one start, inside one window in ten."""
MEETING_S = 60
"""For the workers of ``warm_up`` to be up at the same time."""


@dataclass(frozen=True)
class Call:
    """One call of the GPU stage: its order, its batch, and when it ran on the stage's monotonic clock."""

    call: int
    batch: int
    start_ns: int
    end_ns: int
    prep_ns: int


@dataclass
class Results:
    """What came out of the pipeline. Sums are modulo 2**64 over batches, warm-up ones included."""

    calls: list[Call] = field(default_factory=list)
    sums: dict[int, list[int]] = field(default_factory=dict)
    """Batch number -> checksum of every time it came out."""


def run(plan: WorkloadPlan, on_batch: Callable[[int], None], stage_options: Mapping[str, Any] | None = None) -> Results:
    """Run the pipeline of ``plan`` once.

    ``on_batch`` gets the number of batches received so far; ``stage_options`` are further Ray options of the GPU
    stage's actor (its node, its runtime environment).
    """
    results = Results()
    for batch in _stream(plan, stage_options or {}):
        number = int(batch["id"][0])
        results.sums.setdefault(number, []).append(checksum(batch["data"]))
        labels = {name: int(batch[name][0]) for name in ("call", "start_ns", "end_ns", "prep_ns")}
        results.calls.append(Call(batch=number, **labels))
        on_batch(len(results.calls))
    return results


@dataclass(frozen=True)
class Verified:
    """Sums modulo 2**64 over all batches, and the first ones that are missing, doubled or wrong, None if none is."""

    expected: int
    got: int
    wrong: str | None


def verify(plan: WorkloadPlan, sums: dict[int, list[int]]) -> Verified:
    """Check that every batch came out once and right. ``sums``: batch number -> checksum of every time it came out."""
    total = plan.warmup_blocks + plan.blocks
    wanted = {number: checksum(_expected_output(plan, number)) for number in range(total)}
    faults = [
        f"batch {number} came out {len(sums.get(number, ()))} times"
        for number in wanted
        if len(sums.get(number, ())) != 1
    ]
    faults += [
        f"batch {number} has checksum {got:#x} instead of {wanted[number]:#x}"
        for number, values in sums.items()
        if number in wanted
        for got in values
        if got != wanted[number]
    ]
    faults += [f"batch {number} was never put in" for number in sums if number not in wanted]
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    return Verified(
        expected=sum(wanted.values()) % 2**64,
        got=sum(value for values in sums.values() for value in values) % 2**64,
        wrong=f"wrong results: {'; '.join(faults[:3])}{more}." if faults else None,
    )


def _expected_output(plan: WorkloadPlan, number: int) -> np.ndarray:
    batch = expected(number, plan.prep)
    if plan.device.kind == "emulated":
        return emulated.expected_output(batch, plan.matmuls)
    return cuda.expected_output(batch, plan.matmuls, plan.device.inner)


@dataclass(frozen=True)
class Timing:
    """How the GPU stage spent the window, from its calls.

    ``opened_ns``: start of the first call; ``closed_ns``: end of the last; ``wall_s``: between them. ``wait_ms``: mean
    time a batch with no call running, ``call_ms``: with one running. ``producer_bound``: the stage waited for more than
    a quarter of the time that it worked.
    """

    opened_ns: int
    closed_ns: int
    wall_s: float
    wait_ms: float
    call_ms: float
    prep_ms: float
    producer_bound: bool


def timing(plan: WorkloadPlan, calls: Iterable[Call]) -> Timing:
    """Timing of the calls inside the window (call number ``warmup_blocks`` and later)."""
    inside = sorted((call for call in calls if call.call >= plan.warmup_blocks), key=lambda call: call.start_ns)
    busy_ns = 0
    reached_ns = inside[0].start_ns
    for call in inside:
        busy_ns += max(0, call.end_ns - max(call.start_ns, reached_ns))
        reached_ns = max(reached_ns, call.end_ns)
    wall_ns = reached_ns - inside[0].start_ns
    wait_ns = wall_ns - busy_ns
    return Timing(
        opened_ns=inside[0].start_ns,
        closed_ns=reached_ns,
        wall_s=wall_ns / 1e9,
        wait_ms=wait_ns / len(inside) / 1e6,
        call_ms=busy_ns / len(inside) / 1e6,
        prep_ms=sum(call.prep_ns for call in inside) / len(inside) / 1e6,
        producer_bound=wait_ns > busy_ns / 4,
    )


def _stream(plan: WorkloadPlan, stage_options: Mapping[str, Any]) -> Iterator[Batch]:
    import ray.data

    blocks = plan.warmup_blocks + plan.blocks
    batches: Any = ray.data.range(blocks, override_num_blocks=blocks)
    if plan.mode != "inline":
        batches = _with_prep(batches, plan)
    batches = batches.map_batches(
        STAGES[plan.mode],
        batch_format="numpy",
        batch_size=None,
        fn_constructor_kwargs={"plan": plan},
        num_cpus=1,
        num_gpus=1 if plan.device.kind == "cuda" else None,
        **_stage_options(plan),
        **stage_options,
    )
    return iter(batches.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=1))


def _with_prep(batches: Any, plan: WorkloadPlan) -> Any:
    """Add prep: one CPU operator, in the compute-bound regime two that do half of the work each."""
    from ray.data import TaskPoolStrategy

    operators, tasks = prep_operators(plan), prep_tasks(plan)
    part = replace(plan.prep, cpu_ms=plan.prep.cpu_ms / operators)
    options: dict[str, Any] = {"batch_format": "numpy", "num_cpus": _prep_cpus(plan)}
    source, first = None, options
    if plan.interval_ms:
        # All tasks of the pool wait at the same time, each for its own batch. For that the rows are read ahead (a read
        # task takes a whole CPU of Ray's, so none would start beside waiting ones), and a task takes so little of a CPU
        # that the size of the pool is the limit.
        source = pace.start(plan.interval_ms)
        batches = batches.materialize()
        first = {**options, "num_cpus": _prep_cpus(plan) / 2, "compute": TaskPoolStrategy(size=tasks)}
    batches = batches.map_batches(_prepare, fn_kwargs={"prep": part, "source": source}, **first)
    if operators == 2:
        # The limit is no limit, but a pool of another size is not fused with the first.
        pool = TaskPoolStrategy(size=tasks)
        batches = batches.map_batches(_prepare_more, fn_kwargs={"cpu_ms": part.cpu_ms}, compute=pool, **options)
    return batches


def prep_operators(plan: WorkloadPlan) -> int:
    """CPU operators, one after the other, that share the work of prep."""
    return 2 if plan.regime == "compute-bound" else 1


def _stage_options(plan: WorkloadPlan) -> dict[str, Any]:
    """Compute strategy of the GPU stage; the in-flight depth is that of every mode, so that no mode is better fed."""
    from ray.data import ActorPoolStrategy

    in_flight = COMPUTE_BOUND_IN_FLIGHT if plan.regime == "compute-bound" else IN_FLIGHT
    if plan.mode == "staged":
        options = staging.staging_options(plan)
        strategy: Any = ActorPoolStrategy  # the patch adds the parameter
        return {"compute": strategy(size=1, max_tasks_in_flight_per_actor=in_flight, pinned_staging=options)}
    compute = ActorPoolStrategy(
        size=1, max_tasks_in_flight_per_actor=in_flight, enable_true_multi_threading=plan.mode == "overlap"
    )
    return {"compute": compute, "max_concurrency": TASK_THREADS}


def _prepare(batch: Any, prep: PrepPlan, source: Any) -> Any:
    """Prep as an operator of its own: one row in, one whole batch out.

    Not before it is due by ``source``, the actor of a ``Pace``: the time above that of the work is waiting, for
    storage, say.
    """
    number = int(batch["id"][0])
    due_ns = time.monotonic_ns()
    if source is not None:
        due_ns += round(_due_in_ms(source) * 1e6)
    started_ns = time.thread_time_ns()
    data = prepare(number, prep)
    prep_ns = time.thread_time_ns() - started_ns
    time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
    return labelled(data, id=number, prep_ns=prep_ns)


def _due_in_ms(source: Any) -> float:
    import ray

    return float(ray.get(source.next_ms.remote()))


def _prepare_more(batch: Any, cpu_ms: float) -> Any:
    """The second half of prep."""
    started_ns = time.thread_time_ns()
    data = walk(batch["data"].copy(), cpu_ms)
    return {**batch, "data": data, "prep_ns": batch["prep_ns"] + time.thread_time_ns() - started_ns}


def warm_up(plan: WorkloadPlan) -> None:
    """Have one warm worker for every prep task of ``plan`` that can run at a time, for the actors, and some to spare.

    A worker that starts inside a window costs 1 to 2 s of CPU time there, and each actor takes one for good, so this
    comes before every capture. Each task prepares a batch, then waits for the others to be there, so that no
    worker runs two. Not in a cluster of several nodes, where tasks cannot meet in a folder.
    """
    import ray.data

    if len(ray.nodes()) > 1:
        return
    others = prep_operators(plan) * prep_tasks(plan)
    actors = 2 if plan.interval_ms else 1  # the GPU stage, the pace
    tasks = others + actors + SPARE_WORKERS
    with tempfile.TemporaryDirectory(prefix="repro-meeting-") as folder:
        batches: Any = ray.data.range(tasks, override_num_blocks=tasks)
        batches = batches.map_batches(
            _meet,
            batch_format="numpy",
            fn_kwargs={"prep": plan.prep, "folder": Path(folder), "tasks": tasks},
            num_cpus=_prep_cpus(plan) * others / tasks,
        )
        for _ in batches.iter_batches(batch_size=None):
            pass


def measure_store() -> float:
    """CPU time of a MiB through the object store, in and read once, in ms (median of five arrays of 16 MiB)."""
    import ray

    mib = 16
    data = np.ones(mib << 18, np.float32)
    samples = []
    for _ in range(5):
        started = time.process_time()
        reference = ray.put(data)
        checksum(ray.get(reference))
        samples.append((time.process_time() - started) * 1e3 / mib)
        del reference
    return float(np.median(samples))


def _meet(batch: Any, prep: PrepPlan, folder: Path, tasks: int) -> Any:
    prepare(0, prep)
    (folder / str(batch["id"][0])).touch()
    deadline = time.monotonic() + MEETING_S
    while len(list(folder.iterdir())) < tasks:
        if time.monotonic() > deadline:
            raise WaitTimeoutError(f"Waited {MEETING_S} s for {tasks} Ray workers to be up at the same time.")
        time.sleep(0.02)
    return batch


def prep_tasks(plan: WorkloadPlan) -> int:
    """Tasks of a prep operator that run at a time: one a core beside the GPU stage's, and enough for Ray Data."""
    least = COMPUTE_BOUND_PREP_TASKS if plan.regime == "compute-bound" else MIN_PREP_TASKS
    return max(least, _cpus() - 1)


def _prep_cpus(plan: WorkloadPlan) -> float:
    """Ray's CPUs for one prep task: all of them together leave one to the GPU stage."""
    return (_cpus() - 1) / (prep_operators(plan) * prep_tasks(plan))


def _cpus() -> int:
    import ray

    return int(ray.cluster_resources()["CPU"])


def configure_ray_data() -> None:
    """Ray Data's settings for a capture: quiet, actors first, no polling of task memory during the window."""
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.enable_operator_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.verbose_progress = False
    # The stage's actor is up before the first prep task starts, so its start costs no window.
    context.wait_for_min_actors_s = ACTOR_START_S
    context.memory_usage_poll_interval_s = None
    context.issue_detectors_config.detectors = []
    context.raise_original_map_exception = True
