"""Tables for the terminal (rich). Text is data: markup in it is escaped."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from repro.report.render import ABSENT
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
