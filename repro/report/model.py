"""The report's model: everything that the template and the figures show. ``repro.report.build`` makes it.

Text of type ``Markdown`` is printed as it is, every other text is data and escaped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from repro.analysis.claims import Claim, Repeats
from repro.analysis.model import Analysis
from repro.report.render import Markdown
from repro.results import CaptureRecord, RunDir, RunRecord
from repro.spec import ProfileSpec


@dataclass(frozen=True)
class ProfileResults:
    """One profile of the run: its captures and what their analyses say."""

    spec: ProfileSpec
    captures: list[CaptureRecord]
    analyses: Repeats
    missing: str
    """Why there is no analysis at all; empty if there is one."""

    @property
    def shown(self) -> Analysis | None:
        """The repeat with the median device idle."""
        return self.analyses[self.shown_repeat] if self.analyses else None

    @property
    def shown_repeat(self) -> int:
        ordered = sorted(self.analyses, key=lambda repeat: (self.analyses[repeat].idle_pct, repeat))
        return ordered[(len(ordered) - 1) // 2]

    @property
    def shown_capture(self) -> CaptureRecord | None:
        """The record of the shown repeat."""
        if not self.analyses:
            return None
        return next((capture for capture in self.captures if capture.repeat == self.shown_repeat), None)

    def range_of(self, figure: Callable[[Analysis], float]) -> tuple[float, float] | None:
        """Lowest and highest of a figure where there are several repeats."""
        values = [figure(analysis) for analysis in self.analyses.values()]
        return (min(values), max(values)) if len(values) > 1 else None


@dataclass(frozen=True)
class ResultRow:
    """A row of the card's table, published and ours side by side."""

    file: str
    stage: Markdown
    published_idle: str
    idle: Markdown
    published_copy_ms: str
    copy_ms: Markdown
    published_note: Markdown
    h2d: Markdown


@dataclass(frozen=True)
class PairRow:
    """A paired difference, published and ours."""

    before: str
    after: str
    figure: str
    published: Markdown
    ours: Markdown
    pairs: Markdown


@dataclass(frozen=True)
class LocalRow:
    """Local metric: where the idle time of one capture went, milliseconds."""

    file: str
    span_ms: float
    busy_ms: float
    idle_ms: float
    copy_ms: float
    wait_ms: float
    staging: Markdown


@dataclass(frozen=True)
class MechanismRow:
    """Mechanism: what the copies were and what they overlapped."""

    file: str
    h2d: Markdown
    h2d_overlapped: Markdown
    d2h: Markdown
    d2h_overlapped: Markdown


@dataclass(frozen=True)
class EndToEndRow:
    """End to end: wall minimum across repeats, and what the GPU stage got."""

    file: str
    wall_min: Markdown
    batches_per_s: Markdown
    gib_per_s: Markdown
    batch_wait: Markdown
    bound: str
    checksum: str


@dataclass(frozen=True)
class AgreementRow:
    """nsys-ai beside our own analysis."""

    file: str
    device_idle_ms: Markdown
    ours_ms: Markdown
    verdict: str


@dataclass(frozen=True)
class ClaimRow:
    """A claim as the report words it. On the emulated device nothing is said about hardware."""

    claim: Claim
    verdict: str


@dataclass(frozen=True)
class Figure:
    """A picture below the report's folder."""

    path: str
    caption: str


@dataclass
class ReportModel:
    """All that ``report.md.j2`` prints."""

    run_dir: RunDir
    record: RunRecord
    emulated: bool
    device: str
    """The device as every table and figure names it."""
    header: list[tuple[str, Markdown]]
    profiles: list[ProfileResults]
    claims: list[Claim]
    claim_rows: list[ClaimRow]
    results: list[ResultRow]
    pairs: list[PairRow]
    local: list[LocalRow]
    mechanism: list[MechanismRow]
    end_to_end: list[EndToEndRow]
    agreement: list[AgreementRow]
    footnotes: list[str]
    """Why a figure is absent; number N is marked "(N)"."""
    warnings: list[str]
    producer_bound: list[str]
    notes: list[str]
    figures: list[Figure] = field(default_factory=list)
