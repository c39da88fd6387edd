"""Plain data that describes one capture's workload; it travels to the capture's driver as JSON and to Ray's actors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from repro.spec import Mode, Profiler, Regime
from repro.workload.prep import PrepPlan

IN_FLIGHT = 8
"""Tasks submitted to the GPU actor ahead of time, the same in every mode. Ray Data refills about every 100 ms, so
a 40 ms stage needs more than three to stay fed."""

COMPUTE_BOUND_IN_FLIGHT = 16
"""The same where compute is the bottleneck: enough for stages of 20 ms with three task threads."""

TASK_THREADS = 2
"""``max_concurrency`` of the GPU actor in every mode but staged, which sets its own: one task thread fetches and
formats a batch while another runs the stage. Without ``enable_true_multi_threading`` the stage still runs one call at a
time, so that flag is all that tells overlap from split."""

MIN_PREP_TASKS = 4
"""Ray Data notices finished tasks and submits new ones every 100 ms, so with fewer prep tasks at a time a stage that
takes 39 ms a batch starves, however fast the cores are."""

COMPUTE_BOUND_PREP_TASKS = 16
"""The same for each of two operators, whose waits add up, and stages of 20 ms."""


@dataclass(frozen=True)
class DevicePlan:
    """Which device the GPU stage opens.

    ``model`` is a model name or file; ``log`` is where the emulated device writes, and staging beside it; a relative
    one is in the report folder of the stage's node. ``inner`` is the inner size of CUDA's matmuls.
    """

    kind: Literal["emulated", "cuda"]
    model: str
    log: str
    inner: int = 0


@dataclass(frozen=True)
class WorkloadPlan:
    """One capture's pipeline.

    ``blocks`` batches inside the window follow ``warmup_blocks`` before it. ``nominal_bytes`` is what copies of a batch
    are accounted at, ``prep`` gives the shape that really travels. ``interval_ms`` is the time between two
    batches of a source that waits for its data (0: as fast as it can). ``profiler`` records the GPU stage; names of
    the files that nsys and torch's profiler write begin with ``stem`` and a dot.
    """

    mode: Mode
    regime: Regime
    blocks: int
    warmup_blocks: int
    matmuls: int
    nominal_bytes: int
    prep: PrepPlan
    interval_ms: float
    device: DevicePlan
    profiler: Profiler = "emulated"
    stem: str = ""
