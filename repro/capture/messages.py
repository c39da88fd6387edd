"""What the kit and the driver process of its Ray cluster say to each other: one JSON object a line.

The kit sends requests on the driver's stdin; the driver answers on a pipe of its own, so that nothing a library prints
can be taken for an answer. End of file on stdin means that the kit is gone: the driver shuts its cluster down.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from repro.workload.calibrate import GpuFacts, GpuRequest
from repro.workload.plan import WorkloadPlan


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Start(_Message):
    """Start Ray, or join the cluster at ``address``. ``device`` is what the GPU stage's node must have."""

    kind: Literal["start"] = "start"
    device: Literal["emulated", "cuda"] = "emulated"
    cpus: int
    temp_dir: str
    object_store_bytes: int
    address: str | None = None


class Measure(_Message):
    """Measure what a MiB through the object store costs and, if asked for, calibrate the GPU."""

    kind: Literal["measure"] = "measure"
    gpu: GpuRequest | None = None


class Run(_Message):
    """Run one capture's pipeline; what a profiler leaves on the stage's node is fetched into ``fetch_to``."""

    kind: Literal["run"] = "run"
    plan: WorkloadPlan
    fetch_to: str = ""


class StageNode(_Message):
    """The node of the GPU stage: Ray's id of it, its address, and how many GPUs Ray sees there."""

    node_id: str
    address: str
    gpus: float


class Started(_Message):
    """``node`` is the driver's own, ``stage_node`` the one that the GPU stage will run on."""

    kind: Literal["started"] = "started"
    node: str
    stage_node: StageNode | None = None


class Measured(_Message):
    kind: Literal["measured"] = "measured"
    store_ms_per_mib: float
    gpu: GpuFacts | None = None


class Batches(_Message):
    """Progress of a run: it lives."""

    kind: Literal["batches"] = "batches"
    received: int


class Ran(_Message):
    """A run is over. Results are checked in the driver: ``expected`` and ``got`` are sums over all batches, ``wrong``
    says what was wrong with them. ``opened_ns`` and ``closed_ns`` are the window on the machine's monotonic clock."""

    kind: Literal["ran"] = "ran"
    expected: str
    got: str
    wrong: str | None
    opened_ns: int
    closed_ns: int
    wall_s: float
    warmup_s: float | None
    wait_ms: float
    call_ms: float
    prep_ms: float
    producer_bound: bool
    opening_ms: float = 0.0
    """From the end of the warm-up to the start of the window: what the profiler took to begin. Batches pile up then."""
    files: list[str] = []
    """What the profiler left on the stage's node, fetched into the folder that the request named."""


class Failed(_Message):
    """The request failed: ``message`` is one line, the rest is that of a ``KitError``. The traceback is in the log."""

    kind: Literal["failed"] = "failed"
    message: str
    remedy: str = ""
    exit_status: int = 1


Request = Start | Measure | Run
Answer = Started | Measured | Batches | Ran | Failed

_requests: TypeAdapter[Any] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
_answers: TypeAdapter[Any] = TypeAdapter(Annotated[Answer, Field(discriminator="kind")])


def parse_request(line: str | bytes) -> Request:
    request: Request = _requests.validate_json(line)
    return request


def parse_answer(line: str | bytes) -> Answer:
    answer: Answer = _answers.validate_json(line)
    return answer
