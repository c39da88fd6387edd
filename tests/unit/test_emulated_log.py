from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from repro.device.clock import FakeClock
from repro.device.emulated import EmulatedDevice
from repro.device.emulated_log import read_log
from repro.device.model import load_model
from repro.errors import InputError, MachineError
from repro.nsysdb.model import Capture

BATCH = np.zeros((4, 8192), np.float32)


def work(device: EmulatedDevice, batches: int = 1) -> None:
    stream = device.default_stream()
    for _ in range(batches):
        device.copy_d2h(device.matmul(device.copy_h2d(BATCH, stream), stream), stream)


def written(log: Path, clock: FakeClock, batches: int = 1) -> EmulatedDevice:
    device = EmulatedDevice(load_model("b200"), log_path=log, clock=clock)
    work(device, batches)
    return device


def test_survives_a_killed_process(tmp_path: Path) -> None:
    log = tmp_path / "device.jsonl"
    victim = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, numpy\n"
            "from repro.device.emulated import open_emulated\n"
            "device = open_emulated('b200', sys.argv[1])\n"
            "stream = device.default_stream()\n"
            "for _ in range(3):\n"
            "    x = device.copy_h2d(numpy.zeros((4, 8192), numpy.float32), stream)\n"
            "    device.copy_d2h(device.matmul(x, stream), stream)\n"
            "for _ in range(5):\n"
            "    device.matmul(x, stream)\n"
            "pinned = device.pin_empty((1, 1), numpy.float32, nominal_bytes=10**15)\n",
            str(log),
        ]
    )
    try:
        # The process is in its endless pinning when its last launch is in the log.
        while not log.exists() or log.read_bytes().count(b"cudaLaunchKernel") < 8:
            assert victim.poll() is None
            time.sleep(0.01)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait(30)
    capture = read_log([log])
    assert (len(capture.kernels), len(capture.memcpys)) == (3, 6)
    assert {kernel.pid for kernel in capture.kernels} == {victim.pid}
    assert capture.metadata["instances_not_closed"] == "1"
    assert capture.metadata["unfinished_operations"] == "5"


def test_tolerates_and_counts_a_torn_last_line(tmp_path: Path) -> None:
    log = tmp_path / "device.jsonl"
    written(log, FakeClock())
    whole = log.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last + 1, len(whole) - 1):
        log.write_bytes(whole[:cut])
        assert read_log([log]).metadata["torn_lines"] == "1"


def test_a_device_after_a_torn_line_is_read_whole(tmp_path: Path) -> None:
    log = tmp_path / "device.jsonl"
    clock = FakeClock()
    written(log, clock)
    log.write_bytes(log.read_bytes()[:-5])
    written(log, clock).close()
    capture = read_log([log])
    assert (len(capture.kernels), capture.metadata["torn_lines"], capture.metadata["instances"]) == (2, "1", "2")


@pytest.mark.parametrize("shared", [True, False])
def test_merges_devices_with_unique_correlation_ids(tmp_path: Path, shared: bool) -> None:
    clock = FakeClock()
    logs = [tmp_path / "a.jsonl", tmp_path / ("a.jsonl" if shared else "b.jsonl")]
    devices = [EmulatedDevice(load_model("b200"), log_path=log, clock=clock) for log in logs]
    for _ in range(2):
        for device in devices:
            work(device)
    for device in devices:
        device.close()
    capture = read_log([tmp_path])
    correlations = [row.correlation_id for row in (*capture.kernels, *capture.memcpys)]
    assert len(capture.kernels) == 4
    assert len(set(correlations)) == len(correlations) == 12
    assert set(correlations) <= {call.correlation_id for call in capture.runtime_calls}
    assert capture.kernels == sorted(capture.kernels)


def test_time_0_is_the_opening_of_the_device(tmp_path: Path) -> None:
    log = tmp_path / "device.jsonl"
    clock = FakeClock(start_ns=5_000_000, utc_ns=1_000_000_000)
    written(log, clock)
    capture = read_log([log])
    assert capture.runtime_calls[0].start_ns == 0
    assert capture.utc_epoch_ns == 1_000_000_000
    assert capture.metadata["clock_origin_monotonic_ns"] == "5000000"


def test_a_window_leaves_out_what_started_before_it(tmp_path: Path) -> None:
    log = tmp_path / "device.jsonl"
    clock = FakeClock()
    device = written(log, clock, batches=2)
    opens_ns = clock.now_ns()
    work(device)
    closes_ns = clock.now_ns()
    work(device)
    device.close()
    capture = read_log([log], window_ns=(opens_ns, closes_ns))
    assert (len(capture.kernels), len(capture.memcpys), len(capture.runtime_calls)) == (1, 2, 3)
    assert capture.runtime_calls[0].start_ns == 0
    assert capture.metadata["unfinished_operations"] == "0"
    assert capture.utc_epoch_ns == clock.utc_ns() - clock.now_ns() + opens_ns


def test_work_that_had_not_finished_is_not_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "device.jsonl"
    device = written(log, FakeClock())
    stream = device.default_stream()
    device.matmul(device.copy_h2d(BATCH, stream, nominal_bytes=64 << 20), stream)
    device.copy_h2d(BATCH, device.new_stream())
    assert len(read_log([log]).kernels) == 1
    assert read_log([log]).metadata["unfinished_operations"] == "1"
    device.close()
    assert len(read_log([log]).kernels) == 2


def refused(paths: list[Path]) -> str:
    with pytest.raises(InputError) as caught:
        read_log(paths)
    return str(caught.value)


def test_refuses_what_is_not_a_device_log(tmp_path: Path) -> None:
    assert "cannot be read" in refused([tmp_path / "missing.jsonl"])
    (tmp_path / "foreign.jsonl").write_text('{"a": 1}\n[]\n12\nnot json\n\x00\n')
    assert "no emulated device" in refused([tmp_path / "foreign.jsonl"])
    assert "no emulated device in no file" in refused([])
    (tmp_path / "old.jsonl").write_text(json.dumps(["i", "device", {"schema": "repro.device-log/0"}]) + "\n")
    assert "repro.device-log/0" in refused([tmp_path / "old.jsonl"])
    (tmp_path / "headless.jsonl").write_text(json.dumps(["i", "kernel", 1, 2, 7, 1, "k"]) + "\n")
    assert "before that device's header" in refused([tmp_path / "headless.jsonl"])


def test_refuses_logs_of_different_devices(tmp_path: Path) -> None:
    for device_id in (0, 1):
        log = tmp_path / f"{device_id}.jsonl"
        EmulatedDevice(load_model("b200"), log_path=log, clock=FakeClock(), device_id=device_id).close()
    assert "different devices" in refused([tmp_path])


def test_says_that_the_log_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot write the device log"):
        EmulatedDevice(load_model("b200"), log_path=tmp_path / "file" / "device.jsonl")
    with pytest.raises(MachineError, match="cannot write the device log /dev/full"):
        EmulatedDevice(load_model("b200"), log_path=Path("/dev/full"))


def test_same_program_same_capture(tmp_path: Path) -> None:
    def capture(log: Path) -> Capture:
        written(log, FakeClock(), batches=3).close()
        return read_log([log])

    assert capture(tmp_path / "a.jsonl") == capture(tmp_path / "b.jsonl")
