"""Tables for the terminal (rich). Text is data: markup in it is escaped."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from repro.analysis.model import Analysis, NsysAi
from repro.ray_patches import Status
from repro.report.model import ReportModel, ResultRow
from repro.report.render import ABSENT, count, fixed
from repro.spec import PROFILES
from repro.text import one_line


def cell(text: object) -> str:
    """``text`` as a table cell: one line, without markup."""
    return escape(one_line(str(text)))


def profiles_table() -> Table:
    """The seven profiles with their published values."""
    table = Table(title="Published: one NVIDIA B200, window = kernel span on device 0")
    for name in ("profile", "stage"):
        table.add_column(name)
    for name in ("device idle", "copy_ms"):
        table.add_column(name, justify="right")
    for name in ("note", "needs patch"):
        table.add_column(name)
    for profile in PROFILES.values():
        published = profile.published
        idle, copy_ms, note = ABSENT, ABSENT, ""
        if published:
            idle, note = f"{published.device_idle_pct}%", published.note
            copy_ms = ABSENT if published.copy_ms is None else str(published.copy_ms)
        table.add_row(profile.name, cell(profile.stage), idle, copy_ms, cell(note), profile.needs_patch or "")
    return table


def result_table(model: ReportModel) -> Table:
    """The figures of the card's table, published beside ours; stages and notes are in the report."""
    asked = [f"{name}.sqlite" for name in model.record.spec.profiles]
    rows = [row for row in model.results if row.file in asked]
    table = Table(title=cell(f"Device idle: published and {model.device}"), caption=_absent(model, rows))
    table.add_column("profile", no_wrap=True)
    for name in ("idle,\npublished", "idle,\nours", "copy_ms,\npublished", "copy_ms,\nours"):
        table.add_column(name, justify="right")
    table.add_column("H2D, ours")
    for row in rows:
        cells = (row.published_idle, row.idle, row.published_copy_ms, row.copy_ms, row.h2d)
        table.add_row(cell(row.file.removesuffix(".sqlite")), *map(cell, cells))
    return table


def _absent(model: ReportModel, rows: list[ResultRow]) -> str | None:
    """The reasons that the rows point to."""
    notes = [(f"({number})", note) for number, note in enumerate(model.footnotes, start=1)]
    lines = [f"{mark} {cell(note)}" for mark, note in notes if any(row.idle.endswith(mark) for row in rows)]
    return "\n".join(lines) or None


def claims_table(model: ReportModel) -> Table:
    """The claims with their verdicts; how each was reached is in the report, here only what kept one from holding."""
    table = Table(title=cell(f"Verdicts: {model.device}"))
    for name in ("claim", "published", "verdict"):
        table.add_column(name)
    for row in model.claim_rows:
        reason = "" if row.claim.verdict == "reproduced" else f": {row.claim.reason}"
        table.add_row(*map(cell, (row.claim.text, row.claim.published, f"{row.verdict}{reason}")))
    return table


def analysis_table(analysis: Analysis) -> Table:
    """The figures of one device of one profile."""
    device = analysis.device_name or "unnamed device"
    table = Table(title=cell(f"{analysis.file}: device {analysis.device_id}, {device}"), show_header=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    times = ("span", analysis.span_ms), ("busy", analysis.busy_ms), ("idle", analysis.idle_ms)
    for name, ms in (*times, ("  copying (copy_ms)", analysis.copy_ms), ("  waiting", analysis.wait_ms)):
        table.add_row(name, f"{ms:.3f} ms")
    table.add_row("device idle", f"{analysis.idle_pct:.2f}%")
    table.add_row("kernels", f"{analysis.kernels:,}")
    for name, direction in (("H2D", analysis.h2d), ("D2H", analysis.d2h)):
        speed = f", {fixed(direction.gb_per_s, 2)} GB/s" if direction.count else ""
        size = f"{count(direction.bytes)} bytes"
        table.add_row(name, f"{direction.count:,} copies, {size}, {direction.ms:.3f} ms{speed}")
        table.add_row("  overlapped by kernels", fixed(direction.overlapped_pct, 1, "%"))
        table.add_row("  from or to pageable memory", fixed(direction.pageable_pct, 1, "%"))
    if analysis.nsys_ai:
        table.add_row("nsys-ai, device_idle_ms", _nsys_ai(analysis.nsys_ai))
    for name, reason in analysis.absent.items():
        table.add_row(f"{cell(name)} is absent", cell(reason))
    for reason, rows in analysis.dropped.items():
        table.add_row(f"rows left out: {cell(reason)}", f"{rows:,}")
    for note in analysis.notes:
        table.add_row("note", cell(note))
    return table


def _nsys_ai(answer: NsysAi) -> str:
    if answer.device_idle_ms is None:
        return cell(f"{ABSENT} {answer.error or answer.note}")
    return f"{answer.device_idle_ms:.3f} ms, {'agrees' if answer.agrees else 'DOES NOT AGREE'}"


def patches_table(status: Status) -> Table:
    """What of the patch series is on one Ray."""
    table = Table(title=cell(f"Patches of Ray {status.version} in {status.ray_dir}"))
    for name in ("patch", "state", "files"):
        table.add_column(name)
    for one in status.patches:
        files = "\n".join(f"{path}: {state}" for path, state in one.files.items())
        table.add_row(cell(one.patch.name), one.state, escape(files))
    return table
