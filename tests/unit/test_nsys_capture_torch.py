"""Traces of torch's profiler, made by hand, as profiles."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from repro.analysis import analyze
from repro.capture.torch_profiler import read_trace
from repro.device.torch_recorder import TorchRecorder
from repro.errors import InputError, MachineError, NoGpuActivityError
from repro.nsysdb.model import DEVICE, DTOH, HTOD, PAGEABLE, PINNED
from repro.nsysdb.writer import write_profile

BASE_NS = 1_764_430_000_000_000_000
HOST = {"pid": 4242, "tid": 4243}


def on_device(category: str, name: str, ts: str, dur: str, correlation: int, **arguments: Any) -> str:
    values = {"device": 0, "context": 1, "stream": 7, "correlation": correlation, **arguments}
    return (
        f'{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": {values["device"]}, "tid": 7, "ts": {ts}, '
        f'"dur": {dur}, "args": {json.dumps(values)}}}'
    )


def on_host(category: str, name: str, ts: str, dur: str, **arguments: Any) -> str:
    return (
        f'{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": 4242, "tid": 4243, "ts": {ts}, "dur": {dur}, '
        f'"args": {json.dumps(arguments)}}}'
    )


# The form is Kineto's; numbers stay text here, so that their decimals are what a file would hold.
EVENTS = [
    on_host("user_annotation", "batch 8", "5000000.000", "60000.5"),
    on_host("cuda_runtime", "cudaMemcpyAsync", "5000001.000", "8000.000", correlation=11, cbid=41),
    on_device("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", "5000002.000", "7900.001", 11, bytes=67108864),
    on_host("cuda_runtime", "cudaLaunchKernel", "5008010.000", "4.000", correlation=12),
    on_device("kernel", "void gemm<float>(float*)", "5008020.123", "4333.333", 12),
    on_device("kernel", "void gemm<float>(float*)", "5016020.123", "4333.333", 13),
    on_device("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", "5012360.000", "1200.000", 14, bytes=67108864),
    on_device("gpu_user_annotation", "batch 8", "5008020.123", "4333.333", 12),
    '{"ph": "i", "cat": "kernel", "name": "an instant", "ts": 1}',
    '{"ph": "M", "name": "process_name", "pid": 0, "ts": 0, "args": {"name": "python"}}',
]


def trace(folder: Path, events: list[str] = EVENTS) -> Path:
    path = folder / "split-1.4242.trace.json"
    path.write_text(
        f'{{"schemaVersion": 1, "deviceProperties": [{{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150754820096, '
        f'"numSms": 132}}], "baseTimeNanoseconds": {BASE_NS}, "traceEvents": [{", ".join(events)}]}}'
    )
    return path


def test_rows_and_times_are_exact(tmp_path: Path) -> None:
    capture = read_trace(trace(tmp_path))
    assert (capture.device_id, capture.device_name, capture.sm_count) == (0, "NVIDIA H200", 132)
    assert capture.utc_epoch_ns == BASE_NS + 5_000_000_000
    assert [kernel[:5] for kernel in capture.kernels] == [
        (8_020_123, 12_353_456, 7, 12, 4242),
        (16_020_123, 20_353_456, 7, 13, 4242),
    ]
    assert [(copy.start_ns, copy.end_ns, *copy[5:]) for copy in capture.memcpys] == [
        (2000, 7_902_001, 67108864, HTOD, PAGEABLE, DEVICE),
        (12_360_000, 13_560_000, 67108864, DTOH, DEVICE, PINNED),
    ]
    assert [call.name for call in capture.runtime_calls] == ["cudaMemcpyAsync", "cudaLaunchKernel"]
    assert capture.nvtx == [(0, 60_000_500, 4242, 4243, "batch 8")]


def test_the_profile_is_measured_and_analysed_like_any(tmp_path: Path) -> None:
    path = tmp_path / "split.sqlite"
    write_profile(path, read_trace(trace(tmp_path)))
    analysis = analyze(path, with_nsys_ai=False)
    assert not analysis.emulated
    assert analysis.device_name == "NVIDIA H200"
    assert (analysis.span_ns, analysis.idle_ns, analysis.copy_ns) == (12_333_333, 3_666_667, 1_200_000)
    assert analysis.h2d.pageable_pct == 100
    assert analysis.h2d.gb_per_s == pytest.approx(67108864 / 7_900_001)


def test_a_huge_time_loses_no_nanosecond(tmp_path: Path) -> None:
    """Older versions write microseconds since 1970: beyond what a float of 64 bits holds to the nanosecond."""
    events = [
        on_device("kernel", "k", "1764430000000001.001", "0.002", 1),
        on_device("kernel", "k", "1764430000000001.999", "0.003", 2),
    ]
    assert [kernel[:2] for kernel in read_trace(trace(tmp_path, events)).kernels] == [(0, 2), (998, 1001)]


def test_unknown_copies_stay_unknown(tmp_path: Path) -> None:
    capture = read_trace(trace(tmp_path, [*EVENTS, on_device("gpu_memcpy", "Memcpy Odd", "5000000", "1", 99, bytes=5)]))
    assert capture.memcpys[0][5:] == (5, 0, 7, 7)


def test_without_kernels_another_profiler_is_suspected(tmp_path: Path) -> None:
    with pytest.raises(NoGpuActivityError, match="recorded no kernels") as caught:
        read_trace(trace(tmp_path, EVENTS[:3]))
    assert "CUPTI" in caught.value.remedy


def test_several_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="devices 0, 1"):
        read_trace(trace(tmp_path, [*EVENTS, on_device("kernel", "k", "5000000", "1", 99, device=1)]))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"traceEvents": 3}', '{"events": []}', '{"traceEvents": [3]}'],
    ids=lambda text: text or "empty",
)
def test_what_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.trace.json").write_text(text)
    with pytest.raises(InputError, match="is no trace of torch's profiler"):
        read_trace(tmp_path / "a.trace.json")


def test_an_event_without_its_stream_is_named(tmp_path: Path) -> None:
    events = [*EVENTS, '{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": {"device": 0}}']
    with pytest.raises(InputError, match=r"'k' .* says no"):
        read_trace(trace(tmp_path, events))


def test_the_recorder_refuses_a_process_that_nsys_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/nsight/libToolsInjection64.so")
    with pytest.raises(MachineError, match="CUPTI serves one"):
        TorchRecorder("split-1", tmp_path)


@pytest.mark.needs("torch")
def test_the_recorder_traces_all_threads_of_the_window(tmp_path: Path) -> None:
    """On a machine without a GPU: the ranges of every thread are in the trace, and no kernels."""
    import torch

    def call(name: str) -> None:
        with torch.profiler.record_function(name):
            torch.ones(64, 64) @ torch.ones(64, 64)

    call("before")
    recorder = TorchRecorder("split-1", tmp_path / "reports")
    recorder.start()
    threads = [threading.Thread(target=call, args=(f"batch {number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    call("batch 3")
    recorder.stop()
    (path,) = (tmp_path / "reports").iterdir()
    assert path.name == f"split-1.{os.getpid()}.trace.json"
    events = json.loads(path.read_text())["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert sorted(name for name in ranges if name.startswith(("batch", "before"))) == [f"batch {i}" for i in range(4)]
    if not torch.cuda.is_available():
        with pytest.raises(NoGpuActivityError):
            read_trace(path)
