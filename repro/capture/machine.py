"""Facts about this machine and its software for ``run.json``, and the choice of the device."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

import repro
from repro.errors import MachineError

DeviceKind = Literal["emulated", "cuda"]

_PACKAGES = ("ray", "nsys-ai", "numpy", "pyarrow", "torch")


def usable_cores() -> int:
    """Cores this process may run on: its affinity, and below that the container's CPU quota (at least 1)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, min(cores, int(quota)) if quota else cores)


def _cgroup_quota(file: Path) -> float | None:
    try:
        quota, period = file.read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def machine_facts() -> dict[str, Any]:
    """What a reader needs to compare two runs: cores, memory, CPU and kernel. No host name."""
    return {
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "cpu": _cpu_name(),
        "system": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
    }


def provenance() -> dict[str, Any]:
    """When, where and with what a result is made: the fields that every result of the kit begins with."""
    return {
        "created_utc": utc_now(),
        "kit_version": repro.__version__,
        "revision": revision(),
        "versions": versions(),
        "machine": machine_facts(),
    }


def utc_now() -> str:
    """The time, to the second, as ISO 8601."""
    return f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a capture; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def revision() -> str | None:
    """Commit of the kit's source tree, with ``-dirty`` if it was edited; ``None`` outside a git checkout."""
    here = Path(__file__).resolve().parent.parent.parent
    if not (here / ".git").exists() or not shutil.which("git"):
        return os.environ.get("REPRO_REVISION")
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def nvidia_traces() -> list[str]:
    """What on this machine says that there is, or should be, an NVIDIA GPU; empty on a machine without."""
    found = [str(node) for node in (Path("/dev/nvidia0"), Path("/dev/nvidiactl"), Path("/dev/dxg")) if node.exists()]
    for library in ("libcuda.so.1", "nvcuda.dll"):
        try:
            ctypes.CDLL(library)
            found.append(library)
        except OSError:
            continue
    if tool := shutil.which("nvidia-smi"):
        found.append(tool)
    return found


def cuda_problem() -> str | None:
    """Why CUDA cannot be used, or ``None`` if it can."""
    if not find_spec("torch"):
        return "PyTorch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "PyTorch finds no usable CUDA device (driver too old, or no GPU visible)"
    return None


def resolve_device(requested: Literal["auto", "cuda", "emulated"]) -> tuple[DeviceKind, str]:
    """The device to use and why. ``MachineError`` if CUDA was asked for, or is there but does not work.

    ``auto`` never falls back in silence: with any trace of an NVIDIA GPU on the machine it is CUDA or an error.
    """
    if requested == "emulated":
        return "emulated", "asked for"
    problem = cuda_problem()
    if problem is None:
        return "cuda", "CUDA works" if requested == "auto" else "asked for"
    if requested == "cuda":
        raise MachineError(f"No CUDA device: {problem}.", remedy="Use --device=emulated, or run the doctor.")
    if traces := nvidia_traces():
        raise MachineError(
            f"This machine has signs of an NVIDIA GPU ({', '.join(traces)}), but {problem}.",
            remedy="Repair that (python -m repro doctor says how), or ask for --device=emulated.",
        )
    return "emulated", "no NVIDIA device, libcuda or nvidia-smi on this machine"
