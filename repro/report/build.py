"""From the files of a run to the report's model; ``run.json`` and ``analysis/*.json`` are all it reads.

One row of a table is one capture, so that its figures add up; of several repeats it is the one with the median device
idle (the lower of the two middle ones). Differences are taken within a repeat, and their median is shown.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from repro.analysis.claims import judge
from repro.analysis.model import SCHEMA, Analysis, Direction
from repro.errors import InputError
from repro.report.model import (
    AgreementRow,
    ClaimRow,
    EndToEndRow,
    LocalRow,
    MechanismRow,
    PairRow,
    ProfileResults,
    ReportModel,
    ResultRow,
)
from repro.report.render import ABSENT, Markdown, code, escape, fixed, signed
from repro.results import CaptureRecord, RunDir, RunRecord, read_json
from repro.spec import PROFILES, ProfileSpec

MIB: Final = 1 << 20
GIB: Final = 1 << 30

_HOLDS: Final = {
    "reproduced": "holds on the emulated device",
    "not reproduced": "does not hold on the emulated device",
}


def load(run_dir: RunDir) -> ReportModel:
    """Read a run. ``InputError`` if its files are missing, of another version, or do not belong together."""
    record = run_dir.read()
    emulated = record.device.kind == "emulated"
    profiles = [_profile(spec, run_dir, record) for spec in _listed(record)]
    for profile in profiles:
        for analysis in profile.analyses.values():
            if analysis.emulated != emulated:
                raise InputError(
                    f"{run_dir.root}: {analysis.file} is {_kind(analysis.emulated)}, the run's device is "
                    f"{_kind(emulated)}.",
                    remedy="A run has one device; capture it again with --fresh.",
                )
    device = _device_name(record)
    claims = judge(
        {profile.spec.name: profile.analyses for profile in profiles},
        {profile.spec.name: profile.missing for profile in profiles},
    )
    footnotes: list[str] = []
    with_analysis = [profile for profile in profiles if profile.shown]
    return ReportModel(
        run_dir=run_dir,
        record=record,
        emulated=emulated,
        device=device,
        header=_header(record, device, with_analysis),
        profiles=profiles,
        claims=claims,
        claim_rows=[
            ClaimRow(claim, _HOLDS.get(claim.verdict, claim.verdict) if emulated else claim.verdict) for claim in claims
        ],
        results=[_result_row(profile, footnotes) for profile in profiles],
        pairs=_pair_rows({profile.spec.name: profile for profile in profiles}, footnotes),
        local=[_local_row(profile) for profile in with_analysis],
        mechanism=[_mechanism_row(profile, footnotes) for profile in with_analysis],
        end_to_end=[_end_to_end_row(profile, record, footnotes) for profile in with_analysis],
        agreement=[_agreement_row(profile, footnotes) for profile in with_analysis],
        footnotes=footnotes,
        warnings=_warnings(profiles),
        producer_bound=_producer_bound(with_analysis),
        notes=[*record.notes, *_analysis_notes(with_analysis)],
    )


def _device_name(record: RunRecord) -> str:
    """The device as every page names it: an emulated one can not be mistaken for its namesake."""
    if record.device.kind != "emulated":
        return record.device.name
    return f"EMULATED {re.sub('^emulated ', '', record.device.name, flags=re.IGNORECASE)}"


def _kind(emulated: bool) -> str:
    return "emulated" if emulated else "measured"


def _listed(record: RunRecord) -> list[ProfileSpec]:
    """Every published profile, so that the card's table is whole, and what else the run captured."""
    return [spec for spec in PROFILES.values() if spec.published or spec.name in record.spec.profiles]


def _profile(spec: ProfileSpec, run_dir: RunDir, record: RunRecord) -> ProfileResults:
    captures = sorted((c for c in record.captures if c.profile == spec.name), key=lambda capture: capture.repeat)
    analyses: dict[int, Analysis] = {}
    for capture in captures:
        path = run_dir.analysis_path(spec.name, capture.repeat)
        if not capture.file or not path.exists():
            continue
        analysis = read_json(path, Analysis, SCHEMA)
        if capture.sha256 and analysis.sha256 != capture.sha256:
            raise InputError(
                f"{path} is the analysis of another capture than {capture.file}.",
                remedy="Make it again: reproduce --out with this folder.",
            )
        analyses[capture.repeat] = analysis
    return ProfileResults(spec, captures, analyses, "" if analyses else _why_missing(spec, captures, record))


def _why_missing(spec: ProfileSpec, captures: list[CaptureRecord], record: RunRecord) -> str:
    if spec.name not in record.spec.profiles:
        return "not asked for in this run"
    for capture in captures:
        if capture.skipped:
            return f"skipped: {capture.skipped}"
        if capture.error:
            return f"failed: {capture.error}"
    return "captured but not analysed" if captures else "not captured, the run stopped before it"


class _Marks:
    """Absent figures with a number that points to their reason."""

    def __init__(self, footnotes: list[str], profile: str) -> None:
        self._footnotes = footnotes
        self._profile = profile

    def absent(self, reason: str) -> Markdown:
        text = f"{self._profile}: {reason}"
        if text not in self._footnotes:
            self._footnotes.append(text)
        return Markdown(f"{ABSENT} ({self._footnotes.index(text) + 1})")


def _range(low_high: tuple[float, float] | None, digits: int = 1, unit: str = "") -> str:
    return f" ({low_high[0]:.{digits}f} to {low_high[1]:.{digits}f}{unit})" if low_high else ""


def _result_row(profile: ProfileResults, footnotes: list[str]) -> ResultRow:
    published, shown = profile.spec.published, profile.shown
    if shown:
        idle = Markdown(f"{shown.idle_pct:.1f}%{_range(profile.range_of(lambda a: a.idle_pct), 1, '%')}")
        copy_ms = Markdown(f"{shown.copy_ms:.1f}{_range(profile.range_of(lambda a: a.copy_ms))}")
        h2d = _h2d_note(shown.h2d)
    else:
        idle = copy_ms = h2d = _Marks(footnotes, profile.spec.name).absent(profile.missing)
    return ResultRow(
        file=f"{profile.spec.name}.sqlite",
        stage=Markdown(profile.spec.stage),
        published_idle=f"{published.device_idle_pct}%" if published else ABSENT,
        idle=idle,
        published_copy_ms=str(published.copy_ms) if published and published.copy_ms is not None else ABSENT,
        copy_ms=copy_ms,
        published_note=Markdown(published.note if published else ABSENT),
        h2d=h2d,
    )


def _memory_kind(direction: Direction) -> str:
    if direction.pageable_pct is None:
        return "host memory unknown"
    if direction.pageable_pct in (0, 100):
        return "pageable" if direction.pageable_pct else "pinned"
    return f"{direction.pageable_pct:.0f}% pageable"


def _rate(direction: Direction) -> Markdown:
    if not direction.count:
        return Markdown("no copies")
    speed = "rate unknown" if direction.gb_per_s is None else f"{direction.gb_per_s:.1f} GB/s"
    return Markdown(f"{speed} {_memory_kind(direction)}")


def _h2d_note(direction: Direction) -> Markdown:
    if direction.overlapped_pct is None:
        return _rate(direction)
    return Markdown(f"{_rate(direction)}, {direction.overlapped_pct:.1f}% overlapped")


@dataclass(frozen=True)
class _Difference:
    before: str
    after: str
    figure: str
    unit: str
    of_analysis: Callable[[Analysis], float]
    of_card: Callable[[ProfileSpec], float | None]


def _card_idle(spec: ProfileSpec) -> float | None:
    return spec.published.device_idle_pct if spec.published else None


def _card_copy_ms(spec: ProfileSpec) -> float | None:
    return spec.published.copy_ms if spec.published else None


_DIFFERENCES: Final = (
    *(
        _Difference(before, after, "device idle", " points", lambda a: a.idle_pct, _card_idle)
        for before, after in (
            ("inline", "split"),
            ("split", "pinned"),
            ("split", "overlap"),
            ("final_split", "final_staged"),
        )
    ),
    _Difference("final_split", "final_staged", "copy_ms", " ms", lambda a: a.copy_ms, _card_copy_ms),
)


def _pair_rows(profiles: dict[str, ProfileResults], footnotes: list[str]) -> list[PairRow]:
    rows = []
    for difference in _DIFFERENCES:
        before, after = profiles[difference.before], profiles[difference.after]
        pairs = [
            (difference.of_analysis(before.analyses[repeat]), difference.of_analysis(after.analyses[repeat]))
            for repeat in sorted(set(before.analyses) & set(after.analyses))
        ]
        published = _published_change(difference, before.spec, after.spec)
        if pairs:
            ours = _change(pairs, difference.unit)
            deltas = [after_value - before_value for before_value, after_value in pairs]
            spread = f"{signed(min(deltas))} to {signed(max(deltas))}" if len(deltas) > 1 else "no spread known"
            shown = Markdown(f"{len(pairs)}, {spread}")
        else:
            lacking = next((p for p in (before, after) if p.missing), before)
            reason = lacking.missing or f"no repeat in common with {difference.after}"
            ours = _Marks(footnotes, lacking.spec.name).absent(reason)
            shown = Markdown(ABSENT)
        rows.append(PairRow(difference.before, difference.after, difference.figure, published, ours, shown))
    return rows


def _published_change(difference: _Difference, before: ProfileSpec, after: ProfileSpec) -> Markdown:
    values = difference.of_card(before), difference.of_card(after)
    if values[0] is None or values[1] is None:
        return Markdown(ABSENT)
    return _change([(values[0], values[1])], difference.unit)


def _change(pairs: Sequence[tuple[float, float]], unit: str) -> Markdown:
    """The median difference; for milliseconds also in percent of the median before."""
    text = signed(statistics.median(after - before for before, after in pairs), 1, unit)
    relative = [100 * (after - before) / before for before, after in pairs if before]
    if unit == " ms" and relative:
        return Markdown(f"{text} ({signed(statistics.median(relative), 1, '%')})")
    return text


def _local_row(profile: ProfileResults) -> LocalRow:
    shown, capture = profile.shown, profile.shown_capture
    assert shown is not None
    staging = capture.staging if capture else None
    text = Markdown("not staged")
    if staging:
        fallback = f", {escape(staging.fallback)}" if staging.fallback else ""
        text = Markdown(
            f"{staging.host_copy_ms:.1f} ms, {staging.slots} slots of {staging.pinned_bytes / MIB:.0f} MiB in all"
            f"{fallback}"
        )
    return LocalRow(
        file=f"{profile.spec.name}.sqlite",
        span_ms=shown.span_ms,
        busy_ms=shown.busy_ms,
        idle_ms=shown.idle_ms,
        copy_ms=shown.copy_ms,
        wait_ms=shown.wait_ms,
        staging=text,
    )


def _mechanism_row(profile: ProfileResults, footnotes: list[str]) -> MechanismRow:
    shown = profile.shown
    assert shown is not None
    marks = _Marks(footnotes, profile.spec.name)

    def overlapped(direction: Direction, name: str) -> Markdown:
        if direction.overlapped_pct is not None:
            return fixed(direction.overlapped_pct, 1, "%")
        return marks.absent(shown.absent.get(f"{name}.overlapped_pct", f"no {name.upper()} copies in the profile"))

    return MechanismRow(
        file=f"{profile.spec.name}.sqlite",
        h2d=Markdown(f"{shown.h2d.count} × {_rate(shown.h2d)}" if shown.h2d.count else "none"),
        h2d_overlapped=overlapped(shown.h2d, "h2d"),
        d2h=Markdown(f"{shown.d2h.count} × {_rate(shown.d2h)}" if shown.d2h.count else "none"),
        d2h_overlapped=overlapped(shown.d2h, "d2h"),
    )


def _end_to_end_row(profile: ProfileResults, record: RunRecord, footnotes: list[str]) -> EndToEndRow:
    marks = _Marks(footnotes, profile.spec.name)
    timed = [capture for capture in profile.captures if capture.wall_s and capture.batches and capture.file]
    fastest = min(timed, key=lambda capture: capture.wall_s or 0, default=None)
    if fastest is None or not fastest.wall_s or not fastest.batches:
        wall = rate = gib = marks.absent("its capture recorded no wall time")
    else:
        per_s = fastest.batches / fastest.wall_s
        wall = fixed(fastest.wall_s, 2, " s")
        rate = fixed(per_s, 1)
        gib = fixed(per_s * record.spec.batch_bytes / GIB, 2)
    capture = profile.shown_capture
    wait = capture.batch_wait_ms if capture else None
    bound = {True: "producer", False: "GPU stage", None: "not known"}[capture.producer_bound if capture else None]
    return EndToEndRow(
        file=f"{profile.spec.name}.sqlite",
        wall_min=wall,
        batches_per_s=rate,
        gib_per_s=gib,
        batch_wait=marks.absent("its capture recorded no waiting time") if wait is None else fixed(wait, 1, " ms"),
        bound=bound,
        checksum=_checksum(profile.captures),
    )


def _checksum(captures: list[CaptureRecord]) -> str:
    checked = [capture.checksum for capture in captures if capture.checksum]
    if not checked:
        return "not checked"
    wrong = [checksum for checksum in checked if not checksum.ok]
    return f"WRONG: got {wrong[0].got}, expected {wrong[0].expected}" if wrong else "as expected"


def _agreement_row(profile: ProfileResults, footnotes: list[str]) -> AgreementRow:
    shown = profile.shown
    assert shown is not None
    marks = _Marks(footnotes, profile.spec.name)
    answer = shown.nsys_ai
    if answer is None:
        theirs, verdict = marks.absent("nsys-ai was not asked"), "not compared"
    elif answer.device_idle_ms is None:
        theirs = marks.absent(f"nsys-ai gives no device_idle_ms: {answer.error or answer.note or 'not in its answer'}")
        verdict = "not compared"
    else:
        theirs = fixed(answer.device_idle_ms, 2)
        verdict = "agrees to 0.01 ms" if answer.agrees else "DOES NOT AGREE"
        if answer.copy_ms is not None:
            verdict += f"; its copy_ms: {answer.copy_ms:.1f}"
    return AgreementRow(f"{profile.spec.name}.sqlite", theirs, fixed(shown.idle_ms, 2), verdict)


def _header(record: RunRecord, device: str, profiles: list[ProfileResults]) -> list[tuple[str, Markdown]]:
    spec = record.spec
    rows: list[tuple[str, Markdown]] = [("Device", Markdown(f"**{escape(device)}**{_device_detail(record)}"))]
    rows.append(("Run", Markdown(f"{code(record.run)}, {escape(record.created_utc)}")))
    revision = code(record.revision) if record.revision else Markdown("revision not known (no git checkout)")
    rows.append(("Kit", Markdown(f"{escape(record.kit_version)}, {revision}")))
    rows.append(("Versions", _listing(record.versions)))
    rows.append(("Machine", _listing(record.machine)))
    batch = (
        f"{spec.blocks} blocks, one batch of {spec.rows} × {spec.cols} float32 ({spec.batch_bytes / MIB:g} MiB) each"
    )
    work = f"{spec.matmuls} matmuls a batch, preparation {spec.prep_ms:g} ms of CPU time a batch"
    rows.append(("Workload", Markdown(f"{batch}; {work}{_measured_prep(profiles)}")))
    if record.payload:
        payload = record.payload
        travelled = (
            f"{payload.travelled_rows} rows ({payload.travelled_bytes / MIB:g} MiB) of a batch travel through Ray"
        )
        nominal = f"copies and kernels are accounted at {payload.nominal_bytes / MIB:g} MiB"
        rows.append(("Payload", Markdown(f"{travelled}, {nominal}: {escape(payload.reason)}")))
    rows += _feeding(profiles)
    rows.append(("Producer-bound", escape(", ".join(_producer_bound(profiles)) or "none of the profiles")))
    rows.append(("Profiler", escape(_PROFILERS[spec.profiler])))
    rows.append(("Repeats", Markdown(str(spec.repeats))))
    rows.append(("Wall minimum", Markdown(_fastest(profiles))))
    rows.append(("Patches of Ray", _patches(record)))
    return rows


_PROFILERS: Final = {
    "emulated": "none: the emulated device's own log, written as an Nsight Systems SQLite",
    "nsys": "Nsight Systems; with a profiler on, times are longer than without",
    "torch": "torch's profiler, written as an Nsight Systems SQLite; with a profiler on, times are longer than without",
}


def _device_detail(record: RunRecord) -> str:
    device = record.device
    if device.model_file:
        digest = f", sha256 {device.model_sha256[:12]}" if device.model_sha256 else ""
        return f", a time model: {code(device.model_file)}{digest}"
    return f", driver {escape(device.driver)}" if device.driver else ""


def _listing(values: Mapping[str, object]) -> Markdown:
    """``name value`` pairs; a size in bytes is shown in GiB."""
    shown = []
    for name, value in values.items():
        if name.endswith("_bytes") and isinstance(value, int):
            name, value = name.removesuffix("_bytes"), f"{value / GIB:.1f} GiB"
        shown.append(f"{escape(name)} {escape(value)}")
    return Markdown(", ".join(shown) or ABSENT)


def _feeding(profiles: list[ProfileResults]) -> list[tuple[str, Markdown]]:
    """Rows on what decides how well the GPU stage is fed: the warm-up, and sources that have a pace of their own."""
    warmups: dict[int, list[str]] = {}
    paced: dict[float, list[str]] = {}
    for profile in profiles:
        capture = profile.shown_capture
        if capture and capture.warmup_batches is not None:
            warmups.setdefault(capture.warmup_batches, []).append(profile.spec.name)
        if capture and capture.source_interval_ms:
            paced.setdefault(capture.source_interval_ms, []).append(profile.spec.name)
    rows = []
    if warmups:
        counts = "; ".join(f"{count}: {', '.join(names)}" for count, names in sorted(warmups.items()))
        rows.append(("Warm-up batches", escape(f"before the window, left out ({counts})")))
    if paced:
        intervals = "; ".join(f"{interval:g} ms: {', '.join(names)}" for interval, names in sorted(paced.items()))
        rows.append(("Paced source", escape(f"a batch every {intervals}. The pace is set, and device idle with it")))
    return rows


def _measured_prep(profiles: list[ProfileResults]) -> str:
    found = [capture.prep_ms for profile in profiles for capture in profile.captures if capture.prep_ms is not None]
    if not found:
        return ""
    low, high = f"{min(found):.1f}", f"{max(found):.1f}"
    return f" (measured: {low if low == high else f'{low} to {high}'} ms)"


def _fastest(profiles: list[ProfileResults]) -> str:
    """The shortest wall time of each profile across its repeats."""
    shown = []
    for profile in profiles:
        walls = [capture.wall_s for capture in profile.captures if capture.wall_s and capture.file]
        if walls:
            shown.append(f"{profile.spec.name} {min(walls):.2f} s")
    return ", ".join(shown) or ABSENT


def _producer_bound(profiles: list[ProfileResults]) -> list[str]:
    """Names of the profiles whose shown capture waited for its producer."""
    shown = [(profile.spec.name, profile.shown_capture) for profile in profiles]
    return [name for name, capture in shown if capture and capture.producer_bound]


def _patches(record: RunRecord) -> Markdown:
    if record.spec.stock_ray:
        return Markdown("none, asked for with --stock-ray")
    shown = [
        f"{code(patch.get('name', 'unnamed'))} {escape(patch.get('state', 'of unknown state'))} "
        f"(sha256 {escape(str(patch.get('sha256', 'not known'))[:12])})"
        for patch in record.patches
    ]
    return Markdown(", ".join(shown) or "none")


def _warnings(profiles: list[ProfileResults]) -> list[str]:
    """What a reader must not miss: wrong results, disagreement, captures that failed or lack repeats."""
    found = []
    for profile in profiles:
        name = profile.spec.name
        if (checksum := _checksum(profile.captures)).startswith("WRONG"):
            found.append(f"{name}: the values that came out of D2H are wrong ({checksum}).")
        for repeat, analysis in profile.analyses.items():
            if analysis.nsys_ai and analysis.nsys_ai.agrees is False:
                theirs = analysis.nsys_ai.device_idle_ms
                found.append(
                    f"{name}, repeat {repeat}: nsys-ai says device idle {theirs} ms, ours is {analysis.idle_ms} ms."
                )
        found += [f"{name}, repeat {c.repeat}: failed: {c.error}" for c in profile.captures if c.error]
    return found


def _analysis_notes(profiles: list[ProfileResults]) -> list[str]:
    notes = []
    for profile in profiles:
        for repeat, analysis in profile.analyses.items():
            stem = RunDir.stem(profile.spec.name, repeat)
            dropped = ", ".join(f"{count} {reason}" for reason, count in analysis.dropped.items() if count)
            notes += [
                f"{stem}: {note}" for note in (*analysis.notes, *([f"rows left out: {dropped}"] if dropped else []))
            ]
    return notes
