"""The doctor's conclusions from made-up facts, and its probes on stand-in commands."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from golden_files import check_golden
from rich.console import Console

from repro import probes
from repro.device.cuda import kernel_driver
from repro.doctor import Check, Command, DoctorReport, doctor, examine, tables
from repro.probes import Cuda, Disk, Facts, Link, Ran, RayFacts
from repro.workload.calibrate import CopyRates

GIB = 2**30
NAMES = ("nsight-command", "pinned-staging")


def ray(**states: str) -> RayFacts:
    patches = {name: states.get(name.replace("-", "_"), "applied") for name in NAMES}
    problems = tuple(f"{name} is {state} (core.py: {state})" for name, state in patches.items() if state != "applied")
    return RayFacts("/venv/ray", "2.58.0", patches, problems)


NO_GPU = Facts(
    python=(3, 11),
    nvidia_traces=(),
    cuda="libcuda.so.1: cannot open shared object file: No such file or directory",
    nvidia_smi=None,
    kernel_driver=None,
    torch=None,
    nsys=None,
    ray=ray(),
    shm=Disk("/dev/shm", 8 * GIB, 0.0),
    disks=(Disk("/data", 50 * GIB, 30.0), Disk("/tmp", 50 * GIB, 30.0)),
    perf_event_paranoid=2,
    leftovers=(),
    docker=None,
    nvidia_toolkit=None,
    compiler=None,
)
B200 = replace(
    NO_GPU,
    nvidia_traces=("/dev/nvidia0", "libcuda.so.1", "/usr/bin/nvidia-smi"),
    cuda=Cuda(13_000, ("NVIDIA B200",)),
    nvidia_smi=Ran(0, "NVIDIA B200, 580.95.05, Disabled"),
    kernel_driver="580.95.05",
    torch=("2.14.0+cu130", "13.0"),
    nsys=Ran(0, "NVIDIA Nsight Systems version 2026.1.3.425-261336219612v0"),
    docker=Ran(0, json.dumps({"ServerVersion": "29.0.1", "Runtimes": {"runc": {}, "nvidia": {}}})),
    compiler=Ran(0, "g++ (Ubuntu 13.3.0) 13.3.0\nCopyright"),
)


def check(facts: Facts, name: str) -> Check:
    return {one.name: one for one in examine(facts).checks}[name]


def command(facts: Facts, name: str) -> Command:
    return {one.command: one for one in examine(facts).commands}[name]


def test_a_gpu_machine_can_do_everything() -> None:
    report = examine(B200)
    assert report.device == "cuda"
    assert report.exit_status == 0
    assert [one.command for one in report.commands if not one.can_run or one.why] == []
    assert {one.verdict for one in report.checks} == {"ok", "note"}
    assert [one.name for one in report.checks if one.verdict == "note"] == ["perf events"]


def test_a_bare_machine_runs_the_emulated_device() -> None:
    report = examine(NO_GPU)
    assert report.device == "emulated"
    assert report.exit_status == 0
    assert command(NO_GPU, "reproduce --device=cuda").why.startswith("gpu is missing; libcuda is missing")
    assert command(NO_GPU, "nsight-command").why == "with a stand-in for nsys"
    assert command(NO_GPU, "flush-race").why.count(";") == 2
    assert not command(NO_GPU, "host build").can_run


@pytest.mark.parametrize(
    ("facts", "name", "verdict", "found", "remedy"),
    [
        (replace(NO_GPU, python=(3, 9)), "python", "broken", "3.9", "3.10 to 3.13"),
        (replace(NO_GPU, python=(3, 14)), "python", "broken", "3.14", "3.10 to 3.13"),
        (
            replace(NO_GPU, ray=RayFacts(error="Ray is not installed", remedy="Install it.")),
            "ray",
            "missing",
            "not installed",
            "Install it.",
        ),
        (
            replace(NO_GPU, ray=RayFacts("/r", "2.60.0", error="The patches are for Ray 2.58.0; /r is Ray 2.60.0.")),
            "ray",
            "broken",
            "is Ray 2.60.0",
            "",
        ),
        (replace(NO_GPU, ray=ray(pinned_staging="edited")), "patches", "broken", "core.py: edited", "ray==2.58.0"),
        (
            replace(NO_GPU, ray=replace(ray(pinned_staging="not applied"), writable=False)),
            "patches",
            "broken",
            "read-only",
            "--stock-ray",
        ),
        (replace(NO_GPU, shm=Disk("/dev/shm", 64 << 20, 0.0)), "shared memory", "broken", "0.1 GiB", "--shm-size"),
        (replace(NO_GPU, shm=None), "shared memory", "missing", "no /dev/shm", "--shm-size"),
        (
            replace(NO_GPU, disks=(Disk("/data", GIB, 99.0), Disk("/tmp", 50 * GIB, 1.0))),
            "disk",
            "broken",
            "1.0 GiB free in /data",
            "Make room",
        ),
        (
            replace(NO_GPU, disks=(Disk("/data", 50 * GIB, 1.0), Disk("/tmp", 50 * GIB, 95.5))),
            "temporary disk",
            "broken",
            "in /tmp (96% used)",
            "TMPDIR",
        ),
    ],
)
def test_what_stops_the_default_command(facts: Facts, name: str, verdict: str, found: str, remedy: str) -> None:
    one = check(facts, name)
    assert one.verdict == verdict
    assert found in one.found
    assert remedy in one.remedy
    report = examine(facts)
    assert report.exit_status == 3
    assert f"{name} is {verdict}" in report.commands[0].why


@pytest.mark.parametrize(
    ("facts", "name", "verdict", "found"),
    [
        (replace(B200, cuda="libcuda.so.1: cannot open"), "libcuda", "broken", "cannot open"),
        (replace(B200, cuda="cuInit returns 999 (CUDA_ERROR_UNKNOWN)"), "libcuda", "broken", "cuInit returns 999"),
        (replace(B200, cuda=Cuda(13_000, ())), "libcuda", "broken", "0 device(s)"),
        (replace(B200, cuda=Cuda(12_080, ("NVIDIA B200",))), "driver", "broken", "CUDA up to 12.8"),
        (
            replace(B200, cuda="no libcuda", nvidia_smi=None, kernel_driver="570.1"),
            "driver",
            "broken",
            "570.1",
        ),
        (replace(B200, cuda="x", nvidia_smi=None, kernel_driver=None), "driver", "broken", "no NVIDIA driver"),
        (replace(B200, cuda="no libcuda", nvidia_smi=None), "gpu", "broken", "/dev/nvidia0"),
        (replace(B200, torch=None), "torch", "missing", "not installed"),
        (replace(B200, torch=("2.13.0+cpu", None)), "torch", "missing", "without CUDA"),
        (replace(B200, nsys=None), "nsys", "missing", "no nsys"),
        (
            replace(B200, nsys=Ran(0, "Nsight Systems version 2025.3.1.9")),
            "nsys for cuda",
            "broken",
            "2025.3.1 is older",
        ),
        (replace(B200, nsys=Ran(1, "", "libelf.so.1 is missing")), "nsys", "broken", "libelf"),
        (replace(B200, nsys=Ran(0, "nonsense")), "nsys", "broken", "unknown version: nonsense"),
    ],
)
def test_a_gpu_that_cannot_be_used_never_falls_back(facts: Facts, name: str, verdict: str, found: str) -> None:
    one = check(facts, name)
    assert (one.verdict, found in one.found) == (verdict, True), one
    report = examine(facts)
    assert report.device == "cuda"
    assert report.exit_status == 3
    assert command(facts, "reproduce --device=emulated").can_run
    if name.startswith("nsys"):
        assert command(facts, "reproduce --device=cuda --profiler=torch").can_run


def test_nvml_is_not_needed() -> None:
    for smi in (None, Ran(9, "", "Failed to initialize NVML: Unknown Error"), Ran(0, "garbage")):
        facts = replace(B200, nvidia_smi=smi)
        assert examine(facts).exit_status == 0
        assert check(facts, "gpu").found == "NVIDIA B200"
    failed = replace(B200, nvidia_smi=Ran(9, "", "Failed to initialize NVML: Unknown Error"))
    assert check(failed, "nvml").verdict == "note"
    assert check(failed, "driver").found == "580.95.05, for CUDA up to 13.0"


def test_a_compatibility_library_makes_an_older_driver_do() -> None:
    facts = replace(B200, nvidia_smi=Ran(0, "NVIDIA H200, 570.1, Disabled"), kernel_driver="570.1")
    assert check(facts, "driver").verdict == "ok"
    assert examine(facts).exit_status == 0


def test_the_driver_decides_where_libcuda_does_not_load() -> None:
    assert check(replace(B200, cuda="no libcuda"), "driver").verdict == "ok"


def test_notes_on_gpus_nsys_patches_and_left_overs() -> None:
    two = replace(B200, cuda=Cuda(13_000, ("NVIDIA B200", "NVIDIA B200")))
    assert "CUDA_VISIBLE_DEVICES" in check(two, "gpu").remedy
    mig = replace(B200, nvidia_smi=Ran(0, "NVIDIA B200, 580.95.05, Enabled"))
    assert "MIG is on" in check(mig, "gpu").remedy
    old = replace(NO_GPU, nsys=Ran(0, "NVIDIA Nsight Systems version 2023.4.4.54-x"))
    assert (check(old, "nsys").verdict, check(old, "nsys").found) == ("ok", "2023.4.4")
    assert check(old, "nsys for cuda").verdict == "note"
    assert command(old, "nsight-command").why == ""
    assert command(replace(old, cuda=B200.cuda), "nsight-command").why == ""
    plain = replace(NO_GPU, ray=ray(nsight_command="not applied"))
    assert check(plain, "patches").found == "not applied: nsight-command; applied: pinned-staging"
    assert examine(plain).exit_status == 0
    left = replace(NO_GPU, leftovers=((12, "nsys --start-agent"), (34, "raylet " + "x" * 200)))
    assert check(left, "left-overs").remedy == "They take CPU from a run: kill 12 34."
    assert len(check(left, "left-overs").found) < 120
    for level, remedy in ((4, "would sample no CPUs"), (None, "would sample no CPUs"), (2, ""), (-1, "")):
        one = check(replace(NO_GPU, perf_event_paranoid=level), "perf events")
        assert one.verdict == "note"
        assert remedy in one.remedy
        assert bool(one.remedy) == bool(remedy)


@pytest.mark.parametrize(
    ("docker", "verdict", "found", "remedy"),
    [
        (None, "missing", "no docker", "Install"),
        (
            Ran(0, json.dumps({"ServerErrors": ["Cannot connect to the Docker daemon"]})),
            "broken",
            "Cannot",
            "systemctl",
        ),
        (Ran(1, "", "permission denied while trying to connect"), "broken", "permission denied", "docker group"),
        (Ran(None, "", "docker gave no answer within 10 s"), "broken", "no answer", "systemctl"),
        (Ran(0, "[]"), "broken", "no engine answers", "systemctl"),
        (Ran(0, json.dumps({"ServerVersion": "20.10.24"})), "ok", "engine 20.10.24", ""),
    ],
)
def test_docker(docker: Ran | None, verdict: str, found: str, remedy: str) -> None:
    one = check(replace(NO_GPU, docker=docker), "docker")
    assert one.verdict == verdict
    assert found in one.found
    assert remedy in one.remedy
    assert command(replace(NO_GPU, docker=docker), "host build").can_run == (verdict == "ok")


def test_the_nvidia_toolkit() -> None:
    engine = Ran(0, json.dumps({"ServerVersion": "29", "Runtimes": {"runc": {}}}))
    assert check(replace(B200, docker=engine), "nvidia toolkit").found == "not installed"
    unknown = replace(B200, docker=engine, nvidia_toolkit="/usr/bin/nvidia-ctk")
    assert "nvidia-ctk runtime configure" in check(unknown, "nvidia toolkit").remedy
    assert command(unknown, "host reproduce").why == "on the emulated device: no GPU reaches a container"


def test_a_docker_client_without_an_engine() -> None:
    """What such a client answers: every key of the engine is there and null."""
    lonely = Ran(0, json.dumps({"ServerVersion": None, "Runtimes": None, "ServerErrors": ["no daemon"]}))
    assert check(replace(B200, docker=lonely), "nvidia toolkit").found == "not installed"


def test_the_terminal_tables() -> None:
    facts = replace(
        B200,
        nsys=Ran(0, "NVIDIA Nsight Systems version 2023.4.4.54"),
        compiler=Ran(1, "", "g++: [red]broken[/red]\x1b[31m"),
        ray=ray(pinned_staging="not applied"),
    )
    console = Console(width=150, record=True, file=io.StringIO())
    for table in tables(examine(facts)):
        console.print(table)
    text = console.export_text()
    assert "[red]broken[/red]\ufffd" in text
    check_golden("doctor.txt", "\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def test_the_json_is_versioned_and_reads_back() -> None:
    report = examine(B200)
    text = report.model_dump_json(by_alias=True)
    assert json.loads(text)["schema"] == "repro.doctor/1"
    assert DoctorReport.model_validate_json(text) == report


def stand_in(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_probes_on_stand_in_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, "nsys", "echo NVIDIA Nsight Systems version 2026.1.3.425")
    stand_in(tmp_path, "nvidia-smi", "echo NVML failed >&2; exit 9")
    stand_in(tmp_path, "docker", "sleep 60 & sleep 60")
    stand_in(tmp_path, "g++", "kill -SEGV $$")
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + "/bin" + os.pathsep + "/usr/bin")
    monkeypatch.setattr(probes, "COMMAND_LIMIT_S", 0.5)
    monkeypatch.setattr(probes.ran, "__defaults__", (0.5,))
    facts = probes.gather()
    assert facts.nsys == Ran(0, "NVIDIA Nsight Systems version 2026.1.3.425")
    assert facts.nvidia_smi == Ran(9, "", "NVML failed")
    assert facts.docker is not None
    assert facts.docker.status is None
    assert "docker gave no answer within 0.5 s" in facts.docker.problem
    assert facts.compiler is not None
    assert "was ended by SIGSEGV" in facts.compiler.problem
    assert facts.ray.version
    assert examine(facts).device == "cuda"  # because of nvidia-smi


def test_a_hanging_command_and_its_children_are_ended(tmp_path: Path) -> None:
    stand_in(tmp_path, "hang", f"sleep 300 & echo $! > {tmp_path}/pid; trap '' TERM; sleep 300")
    started = time.monotonic()
    result = probes.ran([str(tmp_path / "hang")], 0.5)
    assert time.monotonic() - started < 30
    assert result.status is None
    assert "no answer within" in result.problem
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while _lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(child)


def _lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_a_command_that_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("no executable")
    assert "Permission denied" in probes.ran([str(tmp_path / "tool")]).problem


def test_the_libcuda_probe_reads_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's own code on a stand-in for libcuda that answers like one."""
    fake = tmp_path / "fake.py"
    fake.write_text(
        "import ctypes, json\n"
        "class Library:\n"
        "    def __getattr__(self, name):\n"
        "        return getattr(self, '_' + name)\n"
        "    def _cuInit(self, flags): return STATUS\n"
        "    def _cuGetErrorName(self, status, text): text._obj.value = b'CUDA_ERROR_NO_DEVICE'\n"
        "    def _cuDriverGetVersion(self, version): version._obj.value = 13010\n"
        "    def _cuDeviceGetCount(self, count): count._obj.value = 2\n"
        "    def _cuDeviceGet(self, device, number): device._obj.value = number\n"
        "    def _cuDeviceGetName(self, name, size, device): name.value = b'GPU %d' % device.value\n"
        "ctypes.CDLL = lambda name: Library()\n"
    )
    for status, expected in ((0, Cuda(13_010, ("GPU 0", "GPU 1"))), (100, "cuInit returns 100 (CUDA_ERROR_NO_DEVICE)")):
        source = f"STATUS = {status}\n{fake.read_text()}\n{ORIGINAL_PROBE}"
        monkeypatch.setattr(probes, "_CUDA_PROBE", source)
        assert probes.cuda_devices() == expected


ORIGINAL_PROBE = probes._CUDA_PROBE


def test_facts_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 13\n"
    )
    assert kernel_driver(version) == "580.95.05"
    assert kernel_driver(tmp_path / "absent") is None
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise AssertionError('never imported')")
    (tmp_path / "torch/version.py").write_text("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    (tmp_path / "torch-2.14.0.dist-info").mkdir()
    (tmp_path / "torch-2.14.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.14.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert probes._torch() == ("2.14.0", "13.0")
    (tmp_path / "torch/version.py").write_text("cuda: Optional[str] = None\n")
    assert probes._torch() == ("2.14.0", None)
    assert probes.disk(tmp_path / "absent") is None


def test_the_real_machine_gives_a_report() -> None:
    report = doctor()
    assert {one.name for one in report.checks} >= {need for one in report.commands for need in one.needs}
    assert all(one.remedy for one in report.checks if one.verdict == "broken")


RATES = CopyRates(
    pageable_h2d_gb_per_s=8.5, pinned_h2d_gb_per_s=55.04, pageable_d2h_gb_per_s=7.0, pinned_d2h_gb_per_s=54.0
).model_dump_json()


@pytest.mark.parametrize(
    ("link", "text"),
    [
        (Link(5, 16), "PCIe 5 x16: at most 63.0 GB/s a direction"),
        (Link(9, 4), "PCIe 9 x4"),
        (Link(5, 1, c2c=True), "NVLink-C2C: at most 450 GB/s a direction"),
        (None, "the link is unknown"),
    ],
)
def test_copies_stand_beside_what_the_link_can_do(link: Link | None, text: str) -> None:
    found = check(replace(B200, copies=Ran(0, RATES), link=link), "copies")
    assert found.verdict == "ok"
    assert found.found == f"H2D 8.5 GB/s pageable, 55.0 pinned; D2H 7.0 pageable, 54.0 pinned; {text}"


def test_a_copy_benchmark_that_fails_is_named_and_one_that_did_not_run_is_not() -> None:
    failed = check(replace(B200, copies=Ran(3, problem="Traceback\nout of memory")), "copies")
    assert (failed.verdict, failed.found) == ("broken", "out of memory")
    assert "copies" not in [one.name for one in examine(NO_GPU).checks]


def test_the_link_is_read_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"--query-gpu=pcie.link.gen.max,pcie.link.width.max": "5, 16\n5, 8", "-q": "GPU C2C Mode : Enabled"}
    monkeypatch.setattr(probes, "_tool", lambda name, *words: Ran(0, answers[words[0]]))
    assert probes._link() == Link(5, 16, c2c=True)
    answers["-q"] = "GPU C2C Mode : N/A"
    assert probes._link() == Link(5, 16)
    monkeypatch.setattr(probes, "_tool", lambda name, *words: Ran(0, "[N/A], [N/A]"))
    assert probes._link() is None
