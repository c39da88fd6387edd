"""Whole reports from hand-built runs, and what must hold of every report."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from golden_files import check_golden
from report_models import (
    BATCH_BYTES,
    analysis,
    capture_record,
    full_run,
    run_record,
    write_run,
)
from synthetic import graph, write

from repro.analysis.model import NsysAi
from repro.cli import main
from repro.errors import InputError
from repro.nsysdb import schema
from repro.nsysdb.model import DEVICE, HTOD, PAGEABLE, Capture, Kernel, Memcpy
from repro.nsysdb.writer import write_profile
from repro.report import figures, find_run, markdown, write_report
from repro.report.build import load
from repro.report.model import Figure
from repro.results import ChecksumRecord, DeviceRecord, RunDir, sha256_of
from repro.spec import PUBLISHED, RunSpec

CARD = """\
| inline.sqlite | prep inside the GPU UDF | 59.0% | — | serial load→compute |
| split.sqlite | prep as a CPU operator | 29.1% | — | H2D 8.5 GB/s pageable |
| pinned.sqlite | naive `pin_memory` in the UDF | 31.4% | — | worse: staging still serial |
| overlap.sqlite | `enable_true_multi_threading` + a stream per thread | 24.7% | — | 31.3% of H2D overlapped |
| patched_split.sqlite | clean profile after fixing the Ray nsight bug | 31.3% | 339.6 | idle split by copy vs wait |
| final_split.sqlite | baseline for the prototype | 62.4% | 830.3 | before pinned staging |
| final_staged.sqlite | after the map_batches pinned-staging prototype | 54.8% | 155.1 | copy_ms −82% |
"""


def _text(run_dir: RunDir) -> str:
    """The report without drawing its figures, which takes ten times as long."""
    model = load(run_dir)
    model.figures = [Figure("figures/idle.svg", f"Device idle, published and {model.device}")]
    return markdown(model)


def _measured_run(root: Path) -> RunDir:
    """Two repeats on a GPU, with disagreeing pairs, a skipped profile and an nsys-ai that could not run."""
    names = ("inline", "split", "pinned", "overlap", "final_split", "final_staged")
    idle = {"inline": (59.0, 58.0), "split": (29.1, 30.1), "pinned": (31.4, 28.0), "overlap": (24.7, 25.0)}
    record = run_record(
        run="20261129-130000-cuda",
        spec=RunSpec(profiles=names, device="cuda", profiler="nsys", repeats=2, payload="full"),
        device=DeviceRecord(kind="cuda", name="NVIDIA H200", driver="580.95.05"),
        payload=None,
        captures=[
            *(capture_record(name, repeat, wall_s=3.0 + repeat / 10) for repeat in (1, 2) for name in idle),
            capture_record("final_split", 1, wall_s=None, batch_wait_ms=None, producer_bound=None, prep_ms=None),
            capture_record("final_split", 2, file=None, sha256=None, error="nsys did not finish within 120 s"),
            capture_record("final_staged", 1, file=None, sha256=None, skipped="needs the pinned-staging patch of Ray"),
        ],
        notes=["nsys 2026.1.3"],
    )
    analyses = {
        (name, repeat): analysis(
            name,
            idle_pct=values[repeat - 1],
            copy_ms=250.0 + repeat,
            sha256=RunDir.stem(name, repeat),
            h2d_overlapped_pct=31.3 if name == "overlap" else 0.0,
            emulated=False,
            device_name="NVIDIA H200",
        )
        for name, values in idle.items()
        for repeat in (1, 2)
    }
    analyses["final_split", 1] = analysis(
        "final_split",
        idle_pct=62.4,
        copy_ms=830.3,
        h2d_overlapped_pct=None,
        emulated=False,
        device_name="NVIDIA H200",
        dropped={"negative duration": 3, "null time": 0},
        notes=["CUDA graphs were counted as busy"],
        absent={"h2d.overlapped_pct": "the profile has no MEMCPY table"},
        nsys_ai=NsysAi(version="0.3.0", rows=None, error="it ended with status 1: no such table"),
    )
    return write_run(root, record, analyses)


def _hostile_run(root: Path) -> RunDir:
    """Everything that a profile or a log can say is markup, and half the run is missing."""
    bad = "x|y `z` <script>alert(1)</script>\n# heading [l](http://u) \x1b[31m"
    record = run_record(
        run="20261129-140000-emulated",
        spec=RunSpec(profiles=("inline", "split", "pinned"), device="emulated"),
        revision=None,
        versions={"ray": bad},
        machine={},
        device=DeviceRecord(kind="emulated", name=bad),
        payload=None,
        patches=[{"name": bad}],
        captures=[
            capture_record("inline", checksum=ChecksumRecord(expected="1", got=bad, ok=False)),
            capture_record("split", file=None, sha256=None, error=bad),
        ],
        notes=[bad],
    )
    inline = analysis(
        "inline",
        idle_pct=50.0,
        notes=[bad],
        dropped={bad: 1},
        nsys_ai=NsysAi(version=None, rows=[], device_idle_ms=1.0, copy_ms=2.0, agrees=False),
    )
    return write_run(root, record, {("inline", 1): inline})


def test_full_emulated_run(tmp_path: Path) -> None:
    check_golden("report_emulated.md", _text(full_run(tmp_path)))


def test_measured_run_with_gaps(tmp_path: Path) -> None:
    check_golden("report_measured.md", _text(_measured_run(tmp_path)))


def test_hostile_run(tmp_path: Path) -> None:
    text = _text(_hostile_run(tmp_path))
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\n# heading" not in text
    check_golden("report_hostile.md", text)


@pytest.mark.parametrize("make", [full_run, _measured_run, _hostile_run])
def test_the_published_table_is_the_cards(tmp_path: Path, make: Callable[[Path], RunDir]) -> None:
    rows = [
        line.split(" | ") for line in _text(make(tmp_path)).splitlines() if line.startswith("| ") and ".sqlite" in line
    ][: len(PUBLISHED)]
    card = "".join(f"{row[0]} | {row[1]} | {row[2]} | {row[4]} | {row[6]} |\n" for row in rows)
    assert card == CARD


@pytest.mark.parametrize("make", [full_run, _measured_run, _hostile_run])
def test_every_table_is_whole(tmp_path: Path, make: Callable[[Path], RunDir]) -> None:
    """Each row has as many cells as its header, whatever the data says."""
    width = None
    for line in _text(make(tmp_path)).splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = line.replace(r"\|", "").count("|")
        width = width or cells
        assert cells == width, line


def test_emulated_is_on_every_table_and_figure(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path)
    write_report(run_dir)
    text = run_dir.report.read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        if "\n|---" in section:
            assert "EMULATED NVIDIA B200" in section.partition("\n|---")[0], section
    assert "| **reproduced** |" not in text
    words = " ".join(_svg_texts(run_dir.figures / "idle.svg"))
    assert "EMULATED NVIDIA B200" in words
    assert "61.7%" in words


def test_timeline_shows_the_profiles_that_are_there(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path)
    assert [figure.path for figure in write_report(run_dir).figures] == ["figures/idle.svg"]
    capture = Capture(device_id=0, device_name="Emulated NVIDIA B200")
    for batch in range(30):
        start_ns = batch * 100_000_000
        capture.memcpys.append(
            Memcpy(start_ns, start_ns + 8_000_000, 7, 3 * batch, 1, BATCH_BYTES, HTOD, PAGEABLE, DEVICE)
        )
        capture.kernels.append(Kernel(start_ns + 8_000_000, start_ns + 50_000_000, 7, 3 * batch + 1, 1, "matmul"))
    _keep(run_dir, "inline", capture)
    model = write_report(run_dir)
    assert [figure.path for figure in model.figures] == ["figures/idle.svg", "figures/timeline.svg"]
    text = " ".join(_svg_texts(run_dir.figures / "timeline.svg"))
    assert "EMULATED NVIDIA B200" in text
    assert "inline" in text
    assert "split" not in text
    lanes = figures._lanes(run_dir.profile_path("inline"), load(run_dir).profiles[0].analyses[1])
    assert {name: len(lane.start) for name, lane in lanes.items()} == {"kernels": 5, "H2D": 5, "D2H": 0}
    assert all(lane.start.min(initial=0) >= 0 and lane.end.max(initial=0) <= 500_000_000 for lane in lanes.values())


def _keep(run_dir: RunDir, name: str, capture: Capture) -> None:
    """Put a profile into the run, as captured and analysed."""
    path = run_dir.profile_path(name)
    write_profile(path, capture)
    for file in (run_dir.run_json, run_dir.analysis_path(name)):
        file.write_text(file.read_text().replace(f'"sha256": "{name}"', f'"sha256": "{sha256_of(path)}"'))


def test_timeline_of_another_capture_is_refused(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path)
    write_profile(run_dir.profile_path("inline"), Capture(device_id=0, device_name="Emulated NVIDIA B200"))
    with pytest.raises(InputError, match=r"inline\.sqlite is not the capture that was analysed"):
        write_report(run_dir)


def test_timeline_of_graph_launches_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "p.sqlite", {schema.GRAPH: [graph(0, 10**7), graph(3 * 10**7, 4 * 10**7)]})
    of_run = analysis("inline", idle_pct=50.0, sha256=sha256_of(path)).model_copy(update={"span_ns": 4 * 10**7})
    lanes = figures._lanes(path, of_run)
    assert lanes["kernels"].end.tolist() == [10**7, 4 * 10**7]


def _svg_texts(path: Path) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.filterwarnings("error")
def test_names_that_no_figure_has_room_or_a_font_for(tmp_path: Path) -> None:
    record = run_record(device=DeviceRecord(kind="cuda", name="<b>&amp;</text> 漢字 $x^2$ \x00 " + "W" * 300))
    run_dir = write_run(tmp_path, record, {})
    write_report(run_dir)
    text = " ".join(_svg_texts(run_dir.figures / "idle.svg"))
    assert "<b>&amp;</text> 漢字 $x^2$ � WWW" in text
    assert "W…" in text


def test_measured_run_does_not_say_emulated(tmp_path: Path) -> None:
    run_dir = _measured_run(tmp_path)
    write_report(run_dir)
    assert "mulated" not in run_dir.report.read_text(encoding="utf-8")
    assert "mulated" not in (run_dir.figures / "idle.svg").read_text()


def test_rendering_again_changes_no_byte(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path)
    write_report(run_dir)
    first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write_report(run_dir)
    assert first == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_emulated_and_measured_do_not_mix(tmp_path: Path) -> None:
    record = run_record(captures=[capture_record("inline")])
    run_dir = write_run(tmp_path, record, {("inline", 1): analysis("inline", idle_pct=50.0, emulated=False)})
    with pytest.raises(InputError, match=r"inline\.sqlite is measured, the run's device is emulated"):
        load(run_dir)


def test_analysis_of_another_capture_is_refused(tmp_path: Path) -> None:
    record = run_record(captures=[capture_record("inline", sha256="other")])
    run_dir = write_run(tmp_path, record, {("inline", 1): analysis("inline", idle_pct=50.0)})
    with pytest.raises(InputError, match="another capture"):
        load(run_dir)


def test_other_versions_are_refused_by_name(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path)
    run_dir.run_json.write_text(run_dir.run_json.read_text().replace("repro.run/1", "repro.run/2"))
    with pytest.raises(InputError, match=r"'repro\.run/2', this kit reads 'repro\.run/1'"):
        load(run_dir)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"idle_pct": 40.0', '"idle_pct": NaN', "idle_pct: Input should be a finite number"),
        ('"span_ns": 3000000000', '"span_ns": 0', "times do not add up"),
        ('"busy_ns": ', '"busy_ns": 1', "times do not add up"),
        ('"kernels": 288', '"kernels": "many"', "kernels: Input should be a valid integer"),
        ('"notes": []', '"notes": [], "more": 1', "more: Extra inputs are not permitted"),
        ("{", "[" * 99999, "cannot be read: maximum recursion depth"),
        ("{", "", "cannot be read: "),
    ],
    ids=lambda text: text[:20],
)
def test_an_analysis_that_is_none_is_refused_by_name(tmp_path: Path, before: str, after: str, said: str) -> None:
    path = full_run(tmp_path).analysis_path("split")
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(InputError, match=said) as caught:
        load(RunDir(tmp_path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["figures", "report.md"])
def test_something_else_where_the_report_goes(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = full_run(tmp_path)
    (tmp_path / "report.md").mkdir()
    if name == "figures":
        (tmp_path / name).touch()
    else:
        monkeypatch.setattr(figures, "draw", lambda model: [])
    assert main(["report", str(run_dir.root)]) == 2
    assert re.fullmatch(rf"error: {tmp_path}/\S*{name}\S*: \w[\w ]+\.\n", capsys.readouterr().err)


def test_missing_captures_say_why(tmp_path: Path) -> None:
    record = run_record(
        spec=RunSpec(profiles=("inline", "split"), device="emulated"), captures=[capture_record("split")]
    )
    reasons = {profile.spec.name: profile.missing for profile in load(write_run(tmp_path, record, {})).profiles}
    assert reasons["inline"] == "not captured, the run stopped before it"
    assert reasons["split"] == "captured but not analysed"
    assert reasons["pinned"] == "not asked for in this run"


def test_shown_repeat_is_the_median(tmp_path: Path) -> None:
    record = run_record(captures=[capture_record("inline", repeat, sha256="inline") for repeat in (1, 2, 3, 4)])
    idle = {1: 60.0, 2: 50.0, 3: 70.0, 4: 40.0}
    run_dir = write_run(
        tmp_path, record, {("inline", repeat): analysis("inline", idle_pct=pct) for repeat, pct in idle.items()}
    )
    row = load(run_dir).results[0]
    assert row.idle == "50.0% (40.0 to 70.0%)"


def test_find_run(tmp_path: Path) -> None:
    results = tmp_path / "results"
    with pytest.raises(InputError, match="There is no run below"):
        find_run(None, results)
    older, newer = full_run(results / "b").root, full_run(results / "a").root
    assert find_run(None, results).root == newer
    assert find_run("b", results).root == older
    assert find_run(str(older), results).root == older
    with pytest.raises(InputError, match=r"Runs below .*: b, a\."):
        find_run("c", results)
    with pytest.raises(InputError, match=rf"^'{tmp_path}' is no run: there is no run\.json in {tmp_path}/\. "):
        find_run(str(tmp_path), results)


def test_report_does_not_import_ray(tmp_path: Path) -> None:
    full_run(tmp_path)
    program = (
        "import sys; from repro.cli import main; from repro.report import figures; figures.draw = lambda model: []; "
        "status = main(['report', sys.argv[1]]); "
        "sys.exit(status or ('ray' in sys.modules and 'ray was imported'))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "holds on the emulated device" in " ".join(done.stdout.split())
