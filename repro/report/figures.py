"""Figures of a report as SVG with real text. Same run, same bytes; each names its device."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from repro.analysis.intervals import Union, union
from repro.analysis.metrics import busy_union
from repro.analysis.model import Analysis
from repro.errors import InputError
from repro.nsysdb.model import DTOH, HTOD
from repro.nsysdb.reader import read_profile
from repro.report.model import Figure, ReportModel
from repro.report.render import ABSENT
from repro.results import sha256_of, whole_file
from repro.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

TIMELINE_MS: Final = 500.0
"""Stretch of each profile that the timeline shows, from the middle of its kernel span."""
_LONGEST_NAME: Final = 48
"""Characters of a device's name that a figure's title has room for."""
_MOST_ROWS: Final = 500_000
"""Profiles with more kernels and copies are left out of the timeline: reading them takes seconds."""

_STYLE: Final[Any] = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text: small files, and it can be searched
    "svg.hashsalt": "repro",  # element ids that do not change from run to run
    "text.parse_math": False,  # a dollar sign in a device name is a dollar sign
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_PUBLISHED, _COPY, _WAIT = "#b8b8b8", "#e07b39", "#3b6ea5"
_LANES: Final = (("D2H", "#8a5fa8"), ("kernels", "#4d9a57"), ("H2D", _COPY))
"""Bottom to top."""


def draw(model: ReportModel) -> list[Figure]:
    """Write ``figures/`` of the run; returns what was drawn, with paths relative to the report.

    The timeline needs the profiles themselves; those that are no longer in the run's folder are left out of it.
    """
    import matplotlib

    device = one_line(model.device, _LONGEST_NAME)
    drawn = []
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # text stays text: the reader's fonts show it
        caption = f"Device idle, published and {device}"
        drawn.append(_save(model, "idle.svg", caption, _idle_bars(model, caption)))
        timelines = _timelines(model)
        if timelines:
            caption = f"Copies and kernels, {TIMELINE_MS:.0f} ms from the middle of each profile, {device}"
            drawn.append(_save(model, "timeline.svg", caption, _timeline_strips(timelines, caption)))
    return drawn


def _save(model: ReportModel, name: str, caption: str, canvas: Canvas) -> Figure:
    with whole_file(model.run_dir.figures / name) as temporary:
        canvas.savefig(temporary, format="svg", metadata={"Date": None})
    return Figure(f"figures/{name}", caption)


def _new_canvas(height: float) -> tuple[Canvas, Axes]:
    from matplotlib.figure import Figure as NewCanvas

    canvas = NewCanvas(figsize=(8, height), layout="constrained")
    return canvas, canvas.subplots()


def _idle_bars(model: ReportModel, title: str) -> Canvas:
    """Two bars a profile: the published idle, and ours split into copying and waiting (percent of the span)."""
    profiles = model.profiles[::-1]  # a vertical axis counts upwards
    canvas, axes = _new_canvas(0.6 * len(profiles) + 1.4)
    for place, profile in enumerate(profiles):
        upper, lower, height = place + 0.19, place - 0.19, 0.34
        published, shown = profile.spec.published, profile.shown
        if published:
            axes.barh(upper, published.device_idle_pct, height, color=_PUBLISHED)
            axes.text(published.device_idle_pct + 0.7, upper, f"{published.device_idle_pct:.1f}%", va="center")
        if shown:
            copy_pct = 100 * shown.copy_ns / shown.span_ns
            axes.barh(lower, copy_pct, height, color=_COPY)
            axes.barh(lower, shown.idle_pct - copy_pct, height, left=copy_pct, color=_WAIT)
            axes.text(shown.idle_pct + 0.7, lower, f"{shown.idle_pct:.1f}%", va="center")
        else:
            axes.text(0.7, lower, f"{ABSENT} not in this run", va="center", color="#777777")
    axes.set_yticks(range(len(profiles)), [profile.spec.name for profile in profiles])
    axes.set_xlim(0, 100)
    axes.set_xlabel("device idle, % of the kernel span")
    axes.set_title(title, loc="left", fontweight="bold")
    for color, label in ((_PUBLISHED, "published, measured on a B200"), (_COPY, "copying"), (_WAIT, "waiting")):
        axes.barh(0, 0, color=color, label=label)
    canvas.legend(loc="outside lower center", ncols=3, frameon=False)
    return canvas


def _timelines(model: ReportModel) -> dict[str, dict[str, Union]]:
    """Profile -> lane -> what ran in the middle of the profile, nanoseconds from the start of the stretch."""
    found = {}
    for profile in model.profiles:
        analysis, capture = profile.shown, profile.shown_capture
        if not analysis or not capture or not capture.file or analysis.kernels + analysis.memcpys > _MOST_ROWS:
            continue
        path = model.run_dir.root / capture.file
        if path.is_file():
            found[profile.spec.name] = _lanes(path, analysis)
    return found


def _lanes(path: Path, analysis: Analysis) -> dict[str, Union]:
    if sha256_of(path) != analysis.sha256:
        raise InputError(
            f"{path} is not the capture that was analysed.",
            remedy="Capture it again: reproduce --out with this folder.",
        )
    profile = read_profile(path)
    kernels, graphs, memcpys = (
        rows.of_device(analysis.device_id) for rows in (profile.kernels, profile.graphs, profile.memcpys)
    )
    lanes = {"kernels": busy_union(kernels, graphs)}
    for name, kind in (("H2D", HTOD), ("D2H", DTOH)):
        lane = memcpys.where(memcpys.columns["copyKind"] == kind)
        lanes[name] = union(lane.start, lane.end)
    stretch_ns = round(TIMELINE_MS * 1e6)
    first_ns = int(lanes["kernels"].start[0]) + max(0, analysis.span_ns - stretch_ns) // 2
    clipped = {name: lane.clipped(first_ns, first_ns + stretch_ns) for name, lane in lanes.items()}
    return {name: Union(lane.start - first_ns, lane.end - first_ns) for name, lane in clipped.items()}


def _timeline_strips(timelines: dict[str, dict[str, Union]], title: str) -> Canvas:
    """One strip a profile with a lane for each engine; white on all lanes is waiting."""
    canvas, axes = _new_canvas(0.62 * len(timelines) + 1.3)
    names = list(timelines)[::-1]
    for place, name in enumerate(names):
        for lane, (kind, color) in enumerate(_LANES):
            bars = timelines[name][kind]
            spans = list(zip(bars.start / 1e6, (bars.end - bars.start) / 1e6, strict=True))
            axes.broken_barh(spans, (place - 0.39 + 0.26 * lane, 0.24), color=color, linewidth=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, TIMELINE_MS)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left", fontweight="bold", fontsize=8)
    for kind, color in reversed(_LANES):
        axes.barh(0, 0, color=color, label=kind)
    canvas.legend(loc="outside lower center", ncols=3, frameon=False)
    return canvas
