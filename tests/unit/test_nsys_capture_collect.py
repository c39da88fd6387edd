"""Waiting for nsys and fetching its reports: a scripted node with a fake clock, and this machine's own processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from repro.capture import collect
from repro.capture.collect import IDLE_LIMIT_S, Look, NodeFiles, fetch, wait_for_reports
from repro.errors import MachineError, WaitTimeoutError

NSYS = ("QdstrmImporter", "nsys")


class ScriptedNode:
    """Looks one after another, the last one for ever; the clock advances by what is slept."""

    def __init__(self, *looks: Look) -> None:
        self.looks = list(looks)
        self.now_s = 0.0

    def look(self, stem: str) -> Look:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def read(self, name: str, offset: int) -> bytes:
        raise NotImplementedError

    def wait(self) -> dict[str, int]:
        return wait_for_reports(self, "split", clock=lambda: self.now_s, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_waits_until_nothing_writes() -> None:
    growing = [Look(NSYS, float(i), {"split.7.nsys-rep": 5 * i}) for i in range(20)]
    node = ScriptedNode(*growing, Look((), 0.0, {"split.7.nsys-rep": 100}))
    assert node.wait() == {"split.7.nsys-rep": 100}


@pytest.mark.parametrize("cpu_share", [0.1, 0.9])
def test_a_long_export_is_not_stuck(cpu_share: float) -> None:
    steps = round(10 * IDLE_LIMIT_S / 0.2)
    working = [Look(NSYS, 0.2 * cpu_share * i, {"split.7.nsys-rep": 0}) for i in range(steps)]
    assert ScriptedNode(*working, Look((), 0.0, {"split.7.nsys-rep": 5})).wait()


@pytest.mark.parametrize("cpu_share", [0.0, 0.01])
def test_nsys_without_progress_is_named(cpu_share: float) -> None:
    waiting = [Look(NSYS, 0.2 * cpu_share * i, {"split.7.nsys-rep": 0}) for i in range(2000)]
    node = ScriptedNode(*waiting)
    with pytest.raises(WaitTimeoutError, match=r"for QdstrmImporter, nsys to write .* split .*nsys-rep: 0 bytes"):
        node.wait()
    assert IDLE_LIMIT_S < node.now_s < 1.1 * IDLE_LIMIT_S + 1


@pytest.mark.parametrize("reports", [{}, {"split.7.nsys-rep": 0}, {"split.7.nsys-rep": 9, "split.8.nsys-rep": 0}])
def test_a_lost_report_is_named(reports: dict[str, int]) -> None:
    with pytest.raises(MachineError, match="its report of split is lost") as caught:
        ScriptedNode(Look((), 0.0, reports)).wait()
    assert "ray#60904" in caught.value.message


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a report's path in an argument, as nsys has, that burns CPU for a while and then sleeps."""
    burn = "import time\nend = time.process_time() + 0.1\nwhile time.process_time() < end: pass\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", burn, "-o", str(tmp_path / "split.%p")])
    yield process
    process.kill()
    process.wait()


def test_writers_are_found_by_the_report_they_write(tmp_path: Path, writer: subprocess.Popen[bytes]) -> None:
    (tmp_path / "split.7.nsys-rep").write_bytes(b"abc")
    (tmp_path / "split2.7.nsys-rep").write_bytes(b"abc")
    node = NodeFiles(tmp_path)
    deadline = time.monotonic() + 60
    while (look := node.look("split")).cpu_s < 0.05:  # the kernel counts whole ticks, and may count one too few
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(look.writers) == 1
    assert look.reports == {"split.7.nsys-rep": 3}
    assert not node.look("split2").writers
    agent = subprocess.Popen(
        [sys.executable, "-c", "input()", f"--session-name=profile-{writer.pid}"], stdin=subprocess.PIPE
    )
    try:
        assert len(node.look("split").writers) == 2
    finally:
        agent.kill()
        agent.wait()
        assert agent.stdin
        agent.stdin.close()
    writer.kill()
    writer.wait()
    assert not node.look("split").writers


def test_reports_are_fetched_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_CHUNK_BYTES", 1000)
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    (there / "a.nsys-rep").write_bytes(bytes(range(256)) * 17)
    (fetched,) = fetch(NodeFiles(there), ["a.nsys-rep"], here)
    assert fetched == here / "a.nsys-rep"
    assert fetched.read_bytes() == bytes(range(256)) * 17


def test_a_fetch_stays_in_its_folders(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "there").mkdir()
    with pytest.raises(FileNotFoundError):
        fetch(NodeFiles(tmp_path / "there"), ["../secret"], tmp_path / "here")
    assert not list((tmp_path / "here").iterdir())
