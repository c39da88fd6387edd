"""What an analysis says of one device of one profile: ``analysis/NAME.json`` and ``analyze --format=json``.

Definitions: span = first kernel start to last kernel end; busy = union of kernels (and graph traces);
idle = span - busy; copy = idle covered by at least one memcpy of the device; wait = idle - copy.
A figure that could not be had is ``None`` and ``absent`` says why.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA: Final = "repro.analysis/1"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Direction(_Model):
    """Copies in one direction. Overlap is the share of copy time during which a kernel ran.

    The defaults are those of a profile without such copies.
    """

    bytes: int | None = 0
    count: int = 0
    ms: float = 0.0
    gb_per_s: float | None = None
    overlapped_pct: float | None = None
    pageable_pct: float | None = None
    """Share of bytes whose host side is pageable."""
    pageable_gb_per_s: float | None = None
    pinned_gb_per_s: float | None = None


class Gap(_Model):
    """One idle interval, split by what the copy engines did in it."""

    start_ms: float
    """From the start of the span."""
    ms: float
    copy_ms: float
    wait_ms: float


class NsysAi(_Model):
    """nsys-ai's own answer, verbatim, and whether it agrees with ours."""

    version: str | None
    skill: str = "gpu_idle_gaps"
    rows: list[dict[str, Any]] | None
    """The JSON it returned; ``None`` if it could not run, ``error`` says why."""
    error: str | None = None
    device_idle_ms: float | None = None
    copy_ms: float | None = None
    agrees: bool | None = None
    """True if ``device_idle_ms`` is within 0.01 ms of ours; ``None`` where it gave none."""
    note: str = ""


class Analysis(_Model):
    """Metrics of one device. Milliseconds are unrounded ratios of integer nanoseconds."""

    schema_: Literal["repro.analysis/1"] = Field(SCHEMA, alias="schema")
    file: str
    sha256: str
    device_id: int
    device_name: str | None
    emulated: bool
    devices_with_kernels: list[int]
    span_ns: int
    busy_ns: int
    idle_ns: int
    copy_ns: int
    wait_ns: int
    span_ms: float
    busy_ms: float
    idle_ms: float
    idle_pct: float
    copy_ms: float
    wait_ms: float
    kernels: int
    graphs: int
    memcpys: int
    h2d: Direction
    d2h: Direction
    top_gaps: list[Gap]
    dropped: dict[str, int]
    """Rows left out, by reason (``negative duration``, ``null time``, ...)."""
    notes: list[str] = Field(default_factory=list)
    absent: dict[str, str] = Field(default_factory=dict)
    """Figure name -> why it could not be had."""
    nsys_ai: NsysAi | None = None

    model_config = ConfigDict(populate_by_name=True)

    @model_validator(mode="after")
    def _buckets_add_up(self) -> Analysis:
        if (
            self.span_ns <= 0
            or self.busy_ns + self.idle_ns != self.span_ns
            or self.copy_ns + self.wait_ns != self.idle_ns
        ):
            raise ValueError("its times do not add up: span = busy + idle, idle = copy + wait")
        return self
