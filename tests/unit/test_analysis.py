"""analyze(): nsys-ai beside ours, the JSON object, the public captures."""

from __future__ import annotations

import errno
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from synthetic import kernel, memcpy, write

from repro.analysis import analyze, nsys_ai
from repro.analysis.model import Analysis
from repro.errors import NoGpuActivityError
from repro.nsysdb import schema
from repro.results import sha256_of

MS = 1_000_000
PUBLIC = Path(__file__).resolve().parents[3] / "shared" / "data" / "profiles"


def profile(path: Path) -> Path:
    kernels = [kernel(0, 10 * MS), kernel(15 * MS, 20 * MS), kernel(23 * MS, 30 * MS)]
    return write(path, {schema.KERNEL: kernels, schema.MEMCPY: [memcpy(11 * MS, 16 * MS, size=42_500_000)]})


def test_json_object(tmp_path: Path) -> None:
    path = profile(tmp_path / "p.sqlite")
    data = json.loads(analyze(path).model_dump_json(by_alias=True))
    assert data["schema"] == "repro.analysis/1"
    assert data["sha256"] == sha256_of(path)
    numbers = {
        name: data[name] for name in ("span_ms", "busy_ms", "idle_ms", "copy_ms", "wait_ms", "kernels", "memcpys")
    }
    assert numbers == {
        "span_ms": 30,
        "busy_ms": 22,
        "idle_ms": 8,
        "copy_ms": 4,
        "wait_ms": 4,
        "kernels": 3,
        "memcpys": 1,
    }
    assert data["idle_pct"] == pytest.approx(26.6667, abs=1e-4)
    h2d = data["h2d"]
    assert (h2d["bytes"], h2d["ms"], h2d["gb_per_s"], h2d["pageable_pct"]) == (42_500_000, 5, 8.5, 100)
    assert h2d["overlapped_pct"] == 20
    assert data["top_gaps"] == [
        {"start_ms": 10, "ms": 5, "copy_ms": 4, "wait_ms": 1},
        {"start_ms": 20, "ms": 3, "copy_ms": 0, "wait_ms": 3},
    ]
    assert data["d2h"]["gb_per_s"] is None
    assert "no copies in this direction" in data["absent"]["d2h.gb_per_s"]
    Analysis.model_validate(data)


def test_nsys_ai_is_kept_verbatim_and_agrees(tmp_path: Path) -> None:
    path = profile(tmp_path / "p.sqlite")
    before = path.read_bytes()
    beside = analyze(path).nsys_ai
    assert beside is not None
    assert beside.version
    assert beside.rows is not None
    assert beside.rows[-1]["_summary"] is True
    assert beside.device_idle_ms == 8
    assert beside.agrees is True
    assert path.read_bytes() == before  # it writes indexes into what it opens: a copy
    assert [file.name for file in tmp_path.iterdir()] == ["p.sqlite"]


def test_no_device_idle_is_not_an_agreement(tmp_path: Path) -> None:
    path = write(tmp_path / "p.sqlite", {schema.KERNEL: [kernel(0, 10), kernel(20, 30)]})
    beside = analyze(path).nsys_ai
    assert beside is not None
    assert beside.agrees is None
    assert "gave no device_idle_ms" in beside.note


def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    stand_in = tmp_path / "child.py"
    stand_in.write_text(f"import json, sys, time\n{body}\n")
    monkeypatch.setattr(nsys_ai, "_CHILD", stand_in)


@pytest.mark.parametrize(("idle_ms", "copy_ms", "agrees"), [(8.009, 4, True), (8.02, 4, False), (8, 3.9, False)])
def test_disagreement_and_copy_ms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle_ms: float, copy_ms: float, agrees: bool
) -> None:
    rows = [{"_summary": True, "device_idle_ms": idle_ms, "copy_ms": copy_ms}]
    child(tmp_path, monkeypatch, f"open(sys.argv[3], 'w').write({json.dumps(rows)!r})")
    beside = analyze(profile(tmp_path / "p.sqlite")).nsys_ai
    assert beside is not None
    assert (beside.copy_ms, beside.agrees) == (copy_ms, agrees)
    assert ("does not agree" in beside.note) == (not agrees)


def test_failure_and_time_out_of_nsys_ai_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = profile(tmp_path / "p.sqlite")
    child(tmp_path, monkeypatch, "raise LookupError('no such skill')")
    beside = analyze(path).nsys_ai
    assert beside is not None
    assert beside.error == "nsys-ai ended with status 1: LookupError: no such skill"
    assert (beside.rows, beside.agrees) == (None, None)
    child(tmp_path, monkeypatch, "time.sleep(60)")
    assert "no answer in 0 s" in str(nsys_ai.gpu_idle_gaps(path, 0, timeout_s=0.2).error)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "{",
        "null",
        "7",
        "{}",
        "[1]",
        '[["_summary"]]',
        '[{"_summary": 1, "device_idle_ms": NaN}]',
        "[1e999]",
        "[" * 9999,
    ],
)
def test_answers_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    child(tmp_path, monkeypatch, f"open(sys.argv[3], 'w', encoding='latin-1').write({answer!r})")
    beside = nsys_ai.gpu_idle_gaps(profile(tmp_path / "p.sqlite"), 0)
    assert beside.error.startswith("nsys-ai gave no list of JSON objects: "), beside
    assert (beside.rows, beside.device_idle_ms, beside.agrees) == (None, None, None)


@pytest.mark.parametrize(
    ("body", "said"), [("", "No such file"), ("import os; os.kill(os.getpid(), 11)", "status -11")]
)
def test_no_answer_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str) -> None:
    child(tmp_path, monkeypatch, body)
    assert said in str(nsys_ai.gpu_idle_gaps(profile(tmp_path / "p.sqlite"), 0).error)


def test_no_room_for_the_copy_of_nsys_ai_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/copy")

    path = profile(tmp_path / "p.sqlite")
    monkeypatch.setattr(nsys_ai.shutil, "copyfile", full)
    got = analyze(path)
    assert (got.idle_ms, got.nsys_ai.rows) == (8, None)
    assert "could not be run: [Errno 28] No space left on device" in got.nsys_ai.error


@pytest.mark.parametrize("figure", ['"8"', "true", "null", "[8]"])
def test_a_figure_that_is_no_number_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: str) -> None:
    rows = f'[{{"_summary": true, "device_idle_ms": {figure}}}]'
    child(tmp_path, monkeypatch, f"open(sys.argv[3], 'w').write({rows!r})")
    beside = nsys_ai.gpu_idle_gaps(profile(tmp_path / "p.sqlite"), 0)
    assert (beside.error, beside.device_idle_ms, beside.rows) == (None, None, json.loads(rows))


@pytest.mark.skipif(
    not PUBLIC.is_dir(), reason="the public captures are not beside this checkout (../shared/data/profiles)"
)
def test_public_captures() -> None:
    expected = json.loads((PUBLIC / "expected.json").read_text())
    before = {file: hashlib.sha256(file.read_bytes()).digest() for file in PUBLIC.iterdir()}
    with ThreadPoolExecutor() as pool:  # most of it is nsys-ai, a process a capture
        analyses = {
            (name, device): pool.submit(analyze, PUBLIC / name, device and int(device))
            for name, devices in expected.items()
            for device in devices or [None]
        }
    for name, devices in expected.items():
        if devices is None:
            with pytest.raises(NoGpuActivityError):
                analyses[name, None].result()
            continue
        for device, figures in devices.items():
            got = analyses[name, device].result()
            if name == "cuda_graph.sqlite":  # expected.json counts the kernel table alone, the kit graph launches too
                assert got.graphs == 2
                assert f"idle {figures['idle_ms']} ms ({figures['idle_pct']}%)" in got.notes[0]
                continue
            for figure in ("span_ms", "busy_ms", "idle_ms", "copy_ms"):
                assert getattr(got, figure) == pytest.approx(figures[figure], abs=6e-4), (name, device, figure)
            assert got.idle_pct == pytest.approx(figures["idle_pct"], abs=6e-3)
            assert got.nsys_ai is not None
            assert got.nsys_ai.error is None
            assert got.nsys_ai.agrees in (True, None)
    assert {file: hashlib.sha256(file.read_bytes()).digest() for file in PUBLIC.iterdir()} == before
