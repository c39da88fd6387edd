"""What stops a run, said before its minutes are spent: the doctor's checks of memory, disks and GPU, and the folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final, Literal

from repro.capture.machine import nvidia_traces
from repro.doctor import Check, disk_space, examine, shared_memory
from repro.errors import MachineError
from repro.probes import Disk, disk, gather

GPU_CHECKS: Final = ("gpu", "libcuda", "driver")
NSYS_CHECKS: Final = ("nsys", "nsys for cuda")
SHARED_MEMORY: Final = Path("/dev/shm")


def check_machine(
    device: Literal["auto", "cuda", "emulated"],
    folder: Path,
    *,
    profiler: Literal["auto", "nsys", "torch"] = "auto",
) -> None:
    """``MachineError`` with the first thing that keeps ``reproduce`` from running here with its results in ``folder``.

    The GPU, and whether nsys knows its driver where nsys is to record it, are looked at only where there are signs of
    a GPU and ``device`` lets it be used; without any, choosing the device says what there is to say.
    """
    disks: tuple[Disk, ...] = tuple(filter(None, (disk(_existing(folder)), disk(Path(tempfile.gettempdir())))))
    checks: list[Check] = [shared_memory(disk(SHARED_MEMORY)), *disk_space(disks)]
    if device != "emulated" and nvidia_traces():
        needed = GPU_CHECKS if profiler == "torch" else (*GPU_CHECKS, *NSYS_CHECKS)
        checks += [check for check in examine(gather()).checks if check.name in needed]
    for check in checks:
        if not check.usable:
            raise MachineError(f"{check.name}: {check.found}.", remedy=check.remedy)


def check_folder(folder: Path, flag: str = "--out") -> None:
    """``MachineError`` if nothing can be written below ``folder``, which need not be there; ``flag`` names another."""
    existing = _existing(folder)
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return
    remedy = f"Name a folder of yours with {flag}."
    if os.environ.get("REPRO_IN_CONTAINER"):
        remedy = "Run the container as the owner of the mounted folder: --user $(id -u):$(id -g)."
    raise MachineError(f"{folder.absolute()} cannot be written by user {os.getuid()}.", remedy=remedy)


def check_programs() -> None:
    """``MachineError`` if no program can run from the temporary folder: the bug experiments put some there."""
    folder = tempfile.gettempdir()
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        remedy = "Set TMPDIR to a folder on another file system; in a container: --tmpfs /tmp:exec."
        raise MachineError(f"{folder} is mounted noexec, so that no program in it can run.", remedy=remedy)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())
