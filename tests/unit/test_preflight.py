"""What stops a run before it starts, from made-up facts about the machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_doctor import B200, GIB

from repro import preflight
from repro.errors import MachineError
from repro.probes import Cuda, Disk, Facts, Ran

SHM, ROOM = Disk("/dev/shm", 3 * GIB, 1.0), Disk("/data", 50 * GIB, 30.0)


class Machine:
    """Facts that the preflight finds; a healthy machine without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shm, self.room, self.traces = SHM, ROOM, []
        self.facts: Facts = B200
        monkeypatch.setattr(preflight, "disk", lambda path: self.shm if path == Path("/dev/shm") else self.room)
        monkeypatch.setattr(preflight, "nvidia_traces", lambda: self.traces)
        monkeypatch.setattr(preflight, "gather", lambda: self.facts)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def refused(folder: Path, device: str = "auto") -> MachineError:
    with pytest.raises(MachineError) as caught:
        preflight.check_machine(device, folder)  # type: ignore[arg-type]
    assert caught.value.exit_status == 3
    return caught.value


def test_a_healthy_machine_passes(machine: Machine, tmp_path: Path) -> None:
    preflight.check_machine("auto", tmp_path / "results" / "new")
    machine.traces = ["/dev/nvidia0"]
    preflight.check_machine("auto", tmp_path)
    preflight.check_machine("cuda", tmp_path)


def test_small_shared_memory_names_the_flag(machine: Machine, tmp_path: Path) -> None:
    machine.shm = Disk("/dev/shm", 64 << 20, 0.0)
    assert "--shm-size=3g" in refused(tmp_path).remedy


def test_a_full_disk(machine: Machine, tmp_path: Path) -> None:
    machine.room = Disk("/data", 1 * GIB, 80.0)
    assert "disk: 1.0 GiB free" in refused(tmp_path).message


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_injected_libraries_without_a_gpu(machine: Machine, tmp_path: Path, device: str) -> None:
    machine.traces = ["libcuda.so.1"]
    machine.facts = replace(
        B200, nvidia_traces=("libcuda.so.1",), nvidia_smi=None, cuda="cuInit returns 100 (CUDA_ERROR_NO_DEVICE)"
    )
    error = refused(tmp_path, device)
    assert "gpu: none usable, but signs of one: libcuda.so.1" in error.message
    preflight.check_machine("emulated", tmp_path)


def test_a_driver_older_than_cuda_13(machine: Machine, tmp_path: Path) -> None:
    machine.traces = ["/dev/nvidia0"]
    machine.facts = replace(B200, cuda=Cuda(12_080, ("NVIDIA B200",)), kernel_driver="570.1.2", nvidia_smi=None)
    error = refused(tmp_path)
    assert "570.1.2" in error.message
    assert "580" in error.remedy


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.check_folder(tmp_path / "results" / "new")
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: False)
    monkeypatch.delenv("REPRO_IN_CONTAINER", raising=False)
    with pytest.raises(MachineError, match="results cannot be written by user") as caught:
        preflight.check_folder(tmp_path / "results")
    assert "--out" in caught.value.remedy
    monkeypatch.setenv("REPRO_IN_CONTAINER", "1")
    with pytest.raises(MachineError) as caught:
        preflight.check_folder(tmp_path / "results")
    assert "--user $(id -u):$(id -g)" in caught.value.remedy


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "results").touch()
    with pytest.raises(MachineError, match="cannot be written"):
        preflight.check_folder(tmp_path / "results" / "run")


def test_a_temporary_folder_without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.os, "statvfs", lambda folder: SimpleNamespace(f_flag=0))
    preflight.check_programs()
    monkeypatch.setattr(preflight.os, "statvfs", lambda folder: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(MachineError, match="is mounted noexec") as caught:
        preflight.check_programs()
    assert "--tmpfs /tmp:exec" in caught.value.remedy


@pytest.mark.parametrize(
    ("nsys", "found"),
    [(None, "nsys: no nsys on PATH"), (Ran(0, "version 2023.4.4"), "nsys for cuda: 2023.4.4 is older than CUDA 13")],
    ids=["missing", "older than the driver"],
)
def test_nsys_must_know_the_driver_where_it_is_to_record(
    machine: Machine, tmp_path: Path, nsys: Ran | None, found: str
) -> None:
    machine.traces, machine.facts = ["/dev/nvidia0"], replace(B200, nsys=nsys)
    assert found in refused(tmp_path, "cuda").message
    preflight.check_machine("cuda", tmp_path, profiler="torch")
    preflight.check_machine("emulated", tmp_path, profiler="nsys")
