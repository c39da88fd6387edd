"""Results on disk in, markdown and figures out. Nothing here measures."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from repro.errors import InputError
from repro.report.build import load
from repro.report.model import ReportModel
from repro.report.render import render_template
from repro.results import RunDir, write_text

RESULTS: Final = Path("results")
"""Where runs are made, below the working directory."""


def run_folders(results: Path = RESULTS) -> list[Path]:
    """Folders below ``results`` that hold a run; the one whose record was written last comes last."""
    return [path.parent for path in sorted(results.glob("*/run.json"), key=lambda path: path.stat().st_mtime_ns)]


def find_run(run: str | None, results: Path = RESULTS) -> RunDir:
    """The run that a reader means: a folder, a name below ``results``, or without either the newest one."""
    if run is None:
        folders = run_folders(results)
        if not folders:
            raise InputError(f"There is no run below {results}/.", remedy="Make one: python -m repro reproduce.")
        return RunDir(folders[-1])
    places = dict.fromkeys((Path(run), results / run))  # an absolute path is one place
    for folder in places:
        if (folder / "run.json").exists():
            return RunDir(folder)
    raise InputError(
        f"{run!r} is no run: there is no run.json in {' or '.join(f'{folder}/' for folder in places)}.",
        remedy=f"Runs below {results}/: {', '.join(folder.name for folder in run_folders(results)) or 'none'}.",
    )


def write_report(run_dir: RunDir) -> ReportModel:
    """Render ``report.md`` and ``figures/`` of a run from its files; returns the model that they show."""
    from repro.report.figures import draw

    model = load(run_dir)
    model.figures = draw(model)
    write_text(run_dir.report, markdown(model))
    return model


def markdown(model: ReportModel) -> str:
    """The whole text of ``report.md``."""
    return render_template("report.md.j2", model=model)
