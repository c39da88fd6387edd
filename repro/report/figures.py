"""Figures of a report as SVG with real text. Same run, same bytes; each names its device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from repro.report.model import Figure, ReportModel
from repro.report.render import ABSENT
from repro.results import whole_file
from repro.text import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_STYLE: Final[Any] = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text: small files, and it can be searched
    "svg.hashsalt": "repro",  # element ids that do not change from run to run
    "text.parse_math": False,  # a dollar sign in a device name is a dollar sign
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_PUBLISHED, _COPY, _WAIT = "#b8b8b8", "#e07b39", "#3b6ea5"


def draw(model: ReportModel) -> list[Figure]:
    """Write ``figures/`` of the run; returns what was drawn, with paths relative to the report."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        caption = f"Device idle, published and {one_line(model.device)}"
        _save(model, "idle.svg", _idle_bars(model, caption))
    return [Figure("figures/idle.svg", caption)]


def _save(model: ReportModel, name: str, canvas: Canvas) -> None:
    with whole_file(model.run_dir.figures / name) as temporary:
        canvas.savefig(temporary, format="svg", metadata={"Date": None})


def _idle_bars(model: ReportModel, title: str) -> Canvas:
    """Two bars a profile: the published idle, and ours split into copying and waiting (percent of the span)."""
    from matplotlib.figure import Figure as NewCanvas

    profiles = model.profiles[::-1]  # a horizontal axis counts upwards
    canvas = NewCanvas(figsize=(8, 0.6 * len(profiles) + 1.4), layout="constrained")
    axes = canvas.subplots()
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
    for color, label in (
        (_PUBLISHED, "published, measured on a B200"),
        (_COPY, "copying"),
        (_WAIT, "waiting"),
    ):
        axes.barh(0, 0, color=color, label=label)
    canvas.legend(loc="outside lower center", ncols=3, frameon=False)
    return canvas
