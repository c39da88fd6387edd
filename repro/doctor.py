"""What this machine can run, what it cannot, and what to do about it.

``doctor`` looks (:mod:`repro.probes`) and ``examine`` judges: a pure function of the facts. A check says what was
found; a command can run if none of the checks it needs is missing or broken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from repro import __version__
from repro.capture.session import OBJECT_STORE_BYTES
from repro.probes import Cuda, Disk, Facts, Link, Ran, gather
from repro.report.tables import cell
from repro.workload.calibrate import CopyRates

DOCTOR_SCHEMA = "repro.doctor/1"

CUDA_NEEDED = 13_000
DRIVER_NEEDED = 580
"""First driver branch of CUDA 13 (CUDA Toolkit 13.0 release notes, table of driver versions)."""
NSYS_NEEDED = (2025, 3, 2)
"""Nsight Systems of the CUDA 13.0 toolkit; older ones do not know its driver."""
DISK_NEEDED_BYTES = 2 << 30
"""A run of the seven profiles with nsys, and Ray's logs: well below this."""
RAY_DISK_LIMIT_PCT = 95.0
"""Ray creates no objects outside shared memory once the disk of its temporary folder is this full."""
PYTHONS = ((3, 10), (3, 13))
PCIE_GB_PER_S_PER_LANE = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Payload a lane and direction after line coding (PCI Express Base Specification); packets cost some of it."""
C2C_GB_PER_S = 450.0
"""A direction of NVLink-C2C (NVIDIA Grace Hopper Superchip architecture: 900 GB/s both ways)."""

Verdict = Literal["ok", "note", "missing", "broken"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Check(_Frozen):
    """One thing looked at. ``missing`` and ``broken`` stop what needs it; ``note`` is only worth knowing."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""

    @property
    def usable(self) -> bool:
        return self.verdict in ("ok", "note")


class Command(_Frozen):
    """Whether a command can run: ``needs`` names checks; ``why`` says what stops it, or what it does without."""

    command: str
    needs: tuple[str, ...]
    can_run: bool
    why: str = ""


class DoctorReport(_Frozen):
    """Schema ``repro.doctor/1``. ``device`` is the one that ``reproduce`` would take by itself."""

    schema_: str = Field(alias="schema")
    kit_version: str
    device: Literal["cuda", "emulated"]
    checks: tuple[Check, ...]
    commands: tuple[Command, ...]

    @property
    def exit_status(self) -> int:
        """0 if the default command can run, else 3."""
        return 0 if self.commands[0].can_run else 3


def doctor() -> DoctorReport:
    """Look at this machine; never hangs, and imports neither Ray nor torch. Where there is a GPU, copies are timed."""
    return examine(gather(benchmark=True))


def examine(facts: Facts) -> DoctorReport:
    """What follows from the facts."""
    gpu_expected = bool(facts.nvidia_traces)
    checks = (
        _python(facts),
        _ray(facts),
        _patches(facts),
        shared_memory(facts.shm),
        *disk_space(facts.disks),
        _gpu(facts),
        _libcuda(facts),
        _driver(facts),
        _torch(facts),
        _nsys(facts),
        _nsys_cuda(facts),
        *_copies(facts),
        _nvml(facts),
        _perf_events(facts),
        _leftovers(facts),
        _docker(facts.docker),
        _toolkit(facts),
        _compiler(facts.compiler),
    )
    device: Literal["cuda", "emulated"] = "cuda" if gpu_expected else "emulated"
    return DoctorReport(
        schema=DOCTOR_SCHEMA,
        kit_version=__version__,
        device=device,
        checks=checks,
        commands=tuple(_commands(device, checks)),
    )


def tables(report: DoctorReport) -> list[Table]:
    """The report for a terminal."""
    found = Table(title="This machine")
    for name in ("", "verdict", "found", "remedy"):
        found.add_column(name)
    styles = {"ok": "green", "note": None, "missing": "yellow", "broken": "red"}
    for check in report.checks:
        text = (cell(check.name), check.verdict, cell(check.found), cell(check.remedy))
        found.add_row(*text, style=styles[check.verdict])
    commands = Table(
        title=f"Commands (reproduce takes the {report.device} device here)", caption=f"base: {', '.join(BASE)}"
    )
    for name in ("command", "can run", "needs", "why"):
        commands.add_column(name)
    for command in report.commands:
        needs = ", ".join(command.needs).replace(", ".join(BASE), "base")
        commands.add_row(cell(command.command), "yes" if command.can_run else "no", cell(needs), cell(command.why))
    return [found, commands]


BASE = ("python", "ray", "shared memory", "disk", "temporary disk")
GPU = ("gpu", "libcuda", "driver", "torch")
NSYS = ("nsys", "nsys for cuda")


def _commands(device: str, checks: tuple[Check, ...]) -> Iterator[Command]:
    by_name = {check.name: check for check in checks}

    def command(name: str, needs: tuple[str, ...], without: dict[str, str] | None = None) -> Command:
        """``without`` says what the command does where a check that it can do without is not usable."""
        stops = [f"{need} is {by_name[need].verdict}" for need in needs if not by_name[need].usable]
        lacks = [text for need, text in (without or {}).items() if not by_name[need].usable]
        return Command(command=name, needs=needs, can_run=not stops, why="; ".join(stops or lacks))

    stand_in = {"nsys": "with a stand-in for nsys"}
    own = (*GPU, *NSYS) if device == "cuda" else ()
    yield command("reproduce", (*BASE, "patches", *own))
    yield command("reproduce --stock-ray", (*BASE, *own))
    yield command("reproduce --device=emulated", (*BASE, "patches"))
    yield command("reproduce --device=cuda", (*BASE, "patches", *GPU, *NSYS))
    yield command("reproduce --device=cuda --profiler=torch", (*BASE, "patches", *GPU))
    arms = {"compiler": "without the fixed arm: g++ builds its library", "docker": "without the container arm"}
    yield command("flush-race", (*BASE, "patches"), {**stand_in, **arms})
    yield command("nsight-command", (*BASE, "patches"), stand_in)
    yield command("host build", ("docker",))
    no_gpu = {"gpu": "on the emulated device", "nvidia toolkit": "on the emulated device: no GPU reaches a container"}
    yield command("host reproduce", ("docker",), no_gpu if device == "cuda" else {"gpu": no_gpu["gpu"]})


def _python(facts: Facts) -> Check:
    version = f"{facts.python[0]}.{facts.python[1]}"
    if PYTHONS[0] <= facts.python <= PYTHONS[1]:
        return Check(name="python", verdict="ok", found=version)
    return Check(
        name="python", verdict="broken", found=version, remedy="Use Python 3.10 to 3.13: make setup PYTHON=python3.12."
    )


def _ray(facts: Facts) -> Check:
    ray = facts.ray
    if ray.version is None:
        return Check(name="ray", verdict="missing", found=ray.error, remedy=ray.remedy)
    if ray.error:
        return Check(name="ray", verdict="broken", found=ray.error, remedy=ray.remedy)
    return Check(name="ray", verdict="ok", found=f"{ray.version} in {ray.folder}")


def _patches(facts: Facts) -> Check:
    ray = facts.ray
    if not ray.patches:
        return Check(name="patches", verdict="broken", found="cannot be on this Ray", remedy="See ray.")
    if "edited" in ray.patches.values():
        remedy = f"Somebody else has changed Ray: pip install --force-reinstall --no-deps ray=={ray.version}."
        return Check(name="patches", verdict="broken", found="; ".join(ray.problems), remedy=remedy)
    by_state: dict[str, list[str]] = {}
    for name, state in ray.patches.items():
        by_state.setdefault(state, []).append(name)
    found = "; ".join(f"{state}: {', '.join(names)}" for state, names in by_state.items())
    if list(by_state) == ["applied"]:
        return Check(name="patches", verdict="ok", found=found)
    if not ray.writable:
        remedy = "Run as the owner of this Python environment, make one of your own, or use --stock-ray."
        return Check(name="patches", verdict="broken", found=f"{found}; its folder is read-only", remedy=remedy)
    return Check(name="patches", verdict="note", found=found, remedy="reproduce applies them; or: patches apply.")


def shared_memory(shm: Disk | None) -> Check:
    """Whether Ray's object store fits into ``/dev/shm``."""
    needed = f"{OBJECT_STORE_BYTES >> 20} MiB"
    remedy = f"In a container: --shm-size=3g. Else: mount -o remount,size=3g /dev/shm. Ray's objects take {needed}."
    if shm is None:
        return Check(name="shared memory", verdict="missing", found="no /dev/shm", remedy=remedy)
    enough = shm.free_bytes >= OBJECT_STORE_BYTES
    return Check(
        name="shared memory",
        verdict="ok" if enough else "broken",
        found=f"{_gib(shm.free_bytes)} free in /dev/shm",
        remedy="" if enough else remedy,
    )


def disk_space(disks: tuple[Disk, ...]) -> Iterator[Check]:
    """Whether a run fits on the disks of the results and of the temporary folder, given in this order."""
    for name, disk in zip(("disk", "temporary disk"), disks, strict=True):
        found = f"{_gib(disk.free_bytes)} free in {disk.folder} ({disk.used_pct:.0f}% used)"
        remedy = ""
        if disk.free_bytes < DISK_NEEDED_BYTES:
            remedy = f"Make room: {_gib(DISK_NEEDED_BYTES)} are needed."
        elif name == "temporary disk" and disk.used_pct >= RAY_DISK_LIMIT_PCT:
            remedy = (
                f"Ray stops at {RAY_DISK_LIMIT_PCT:.0f}% used: make room, or set TMPDIR to a folder on another disk."
            )
        yield Check(name=name, verdict="broken" if remedy else "ok", found=found, remedy=remedy)


def _gpu(facts: Facts) -> Check:
    listed = _smi_rows(facts)
    if isinstance(facts.cuda, Cuda) and facts.cuda.names:
        names = list(facts.cuda.names)
    else:
        names = [row[0] for row in listed]
    if not names:
        if facts.nvidia_traces:
            found = f"none usable, but signs of one: {', '.join(facts.nvidia_traces)}"
            return Check(name="gpu", verdict="broken", found=found, remedy="See libcuda and driver.")
        return Check(
            name="gpu", verdict="missing", found="no sign of an NVIDIA GPU", remedy="--device=emulated needs none."
        )
    notes = []
    if len(names) > 1:
        notes.append("The kit uses one GPU: choose with CUDA_VISIBLE_DEVICES.")
    if any(len(row) > 2 and row[2] == "Enabled" for row in listed):
        notes.append("MIG is on: figures are those of a slice, not of the GPU.")
    return Check(name="gpu", verdict="note" if notes else "ok", found=", ".join(names), remedy=" ".join(notes))


def _libcuda(facts: Facts) -> Check:
    if isinstance(facts.cuda, Cuda):
        found = f"loads; CUDA {_cuda_version(facts.cuda.version)}, {len(facts.cuda.names)} device(s)"
        if facts.cuda.names:
            return Check(name="libcuda", verdict="ok", found=found)
        return Check(
            name="libcuda", verdict="broken", found=found, remedy="Check CUDA_VISIBLE_DEVICES and permissions."
        )
    if not facts.nvidia_traces:
        return Check(name="libcuda", verdict="missing", found=facts.cuda)
    return Check(
        name="libcuda",
        verdict="broken",
        found=facts.cuda,
        remedy="Install the NVIDIA driver's libraries; in a container run with --gpus all and the toolkit. "
        "A driver that was updated needs a reboot.",
    )


def _driver(facts: Facts) -> Check:
    rows = _smi_rows(facts)
    driver = rows[0][1] if rows else facts.kernel_driver
    found = driver or "no NVIDIA driver"
    if isinstance(facts.cuda, Cuda):
        # What libcuda says decides: it may be NVIDIA's forward-compatibility library on an older kernel driver.
        new_enough = facts.cuda.version >= CUDA_NEEDED
        found = f"{driver or 'unknown version'}, for CUDA up to {_cuda_version(facts.cuda.version)}"
    elif driver is None:
        return Check(name="driver", verdict="broken" if facts.nvidia_traces else "missing", found=found)
    else:
        new_enough = int(driver.partition(".")[0]) >= DRIVER_NEEDED
    remedy = "" if new_enough else f"CUDA 13 needs driver {DRIVER_NEEDED} or newer."
    return Check(name="driver", verdict="ok" if new_enough else "broken", found=found, remedy=remedy)


def _torch(facts: Facts) -> Check:
    remedy = "pip install torch: its build for CUDA 13."
    if facts.torch is None:
        return Check(name="torch", verdict="missing", found="not installed", remedy=remedy)
    version, built_for = facts.torch
    if built_for is None:
        return Check(name="torch", verdict="missing", found=f"{version}, built without CUDA", remedy=remedy)
    return Check(name="torch", verdict="ok", found=f"{version}, built for CUDA {built_for}")


def _nsys(facts: Facts) -> Check:
    remedy = "docker/install-nsight installs one; without nsys: --profiler=torch."
    if facts.nsys is None:
        return Check(name="nsys", verdict="missing", found="no nsys on PATH", remedy=remedy)
    if not facts.nsys.ok:
        return Check(name="nsys", verdict="broken", found=facts.nsys.problem, remedy=remedy)
    match = re.search(r"version (\d+)\.(\d+)\.(\d+)", facts.nsys.stdout)
    if not match:
        return Check(name="nsys", verdict="broken", found=f"unknown version: {facts.nsys.stdout}", remedy=remedy)
    return Check(name="nsys", verdict="ok", found=".".join(match.groups()))


def _nsys_cuda(facts: Facts) -> Check:
    """Whether nsys knows this driver's CUDA: without it NVTX and OS events arrive, kernels do not."""
    needed = ".".join(map(str, NSYS_NEEDED))
    found = _nsys(facts)
    remedy = f"Install nsys {needed} or newer (docker/install-nsight), or use --profiler=torch."
    if not found.usable:
        return Check(name="nsys for cuda", verdict=found.verdict, found="see nsys", remedy=remedy)
    if tuple(map(int, found.found.split("."))) >= NSYS_NEEDED:
        return Check(name="nsys for cuda", verdict="ok", found=f"{found.found} knows CUDA 13")
    text = f"{found.found} is older than CUDA 13, which came with {needed}"
    if isinstance(facts.cuda, Cuda) and facts.cuda.version >= CUDA_NEEDED:
        return Check(name="nsys for cuda", verdict="broken", found=text, remedy=remedy)
    return Check(name="nsys for cuda", verdict="note", found=text)


def _copies(facts: Facts) -> Iterator[Check]:
    """Copy rates beside what the link can do; nothing where there is no GPU to copy to."""
    if facts.copies is None:
        return
    if not facts.copies.ok:
        found = facts.copies.problem.splitlines()[-1]
        yield Check(name="copies", verdict="broken", found=found, remedy="See gpu, libcuda and torch.")
        return
    rates = CopyRates.model_validate_json(facts.copies.stdout.splitlines()[-1])
    found = (
        f"H2D {rates.pageable_h2d_gb_per_s:.1f} GB/s pageable, {rates.pinned_h2d_gb_per_s:.1f} pinned; "
        f"D2H {rates.pageable_d2h_gb_per_s:.1f} pageable, {rates.pinned_d2h_gb_per_s:.1f} pinned; "
        f"{_link_text(facts.link)}"
    )
    yield Check(name="copies", verdict="ok", found=found)


def _link_text(link: Link | None) -> str:
    if link is None:
        return "the link is unknown"
    if link.c2c:
        return f"NVLink-C2C: at most {C2C_GB_PER_S:.0f} GB/s a direction"
    per_lane = PCIE_GB_PER_S_PER_LANE.get(link.pcie_generation)
    text = f"PCIe {link.pcie_generation} x{link.pcie_lanes}"
    return f"{text}: at most {per_lane * link.pcie_lanes:.1f} GB/s a direction" if per_lane else text


def _nvml(facts: Facts) -> Check:
    smi = facts.nvidia_smi
    if smi is None:
        return Check(name="nvml", verdict="note", found="no nvidia-smi on PATH")
    if smi.ok:
        return Check(name="nvml", verdict="ok", found="nvidia-smi answers")
    # libcuda can work without NVML, and NVML without libcuda.
    return Check(name="nvml", verdict="note", found=smi.problem, remedy="Only names and versions come from it.")


def _perf_events(facts: Facts) -> Check:
    level = facts.perf_event_paranoid
    found = "no perf events in this kernel" if level is None else f"perf_event_paranoid is {level}"
    remedy = "" if level is not None and level <= 2 else "nsys would sample no CPUs; the kit does not ask it to."
    return Check(name="perf events", verdict="note", found=found, remedy=remedy)


def _leftovers(facts: Facts) -> Check:
    if not facts.leftovers:
        return Check(name="left-overs", verdict="ok", found="no processes of earlier runs")
    found = "; ".join(f"{pid}: {command[:60]}" for pid, command in facts.leftovers)
    pids = " ".join(str(pid) for pid, _ in facts.leftovers)
    return Check(name="left-overs", verdict="note", found=found, remedy=f"They take CPU from a run: kill {pids}.")


def _docker(docker: Ran | None) -> Check:
    if docker is None:
        return Check(name="docker", verdict="missing", found="no docker on PATH", remedy="Install Docker Engine.")
    info = _docker_info(docker)
    problem = "; ".join(info.get("ServerErrors") or ()) or docker.problem
    if problem or not info.get("ServerVersion"):
        denied = "permission denied" in problem
        remedy = (
            "Join the docker group and log in again, or use sudo." if denied else "Start it: systemctl start docker."
        )
        return Check(name="docker", verdict="broken", found=problem or "no engine answers", remedy=remedy)
    return Check(name="docker", verdict="ok", found=f"engine {info['ServerVersion']}")


def _toolkit(facts: Facts) -> Check:
    if facts.docker and "nvidia" in (_docker_info(facts.docker).get("Runtimes") or {}):
        return Check(name="nvidia toolkit", verdict="ok", found="docker has the nvidia runtime")
    if facts.nvidia_toolkit:
        remedy = "nvidia-ctk runtime configure --runtime=docker, then restart docker."
        found = f"{facts.nvidia_toolkit}, but docker does not know its runtime"
        return Check(name="nvidia toolkit", verdict="missing", found=found, remedy=remedy)
    remedy = "Install the NVIDIA Container Toolkit to give containers a GPU."
    return Check(name="nvidia toolkit", verdict="missing", found="not installed", remedy=remedy)


def _compiler(compiler: Ran | None) -> Check:
    if compiler is None:
        return Check(name="compiler", verdict="missing", found="no g++ on PATH", remedy="Install g++ (apt: g++).")
    if not compiler.ok:
        return Check(name="compiler", verdict="broken", found=compiler.problem, remedy="Install g++ again.")
    return Check(name="compiler", verdict="ok", found=compiler.stdout.partition("\n")[0])


def _smi_rows(facts: Facts) -> list[list[str]]:
    """Name, driver version and MIG mode of each GPU that nvidia-smi lists; empty where it fails."""
    if not facts.nvidia_smi or not facts.nvidia_smi.ok:
        return []
    rows = [[part.strip() for part in line.split(",")] for line in facts.nvidia_smi.stdout.splitlines()]
    return [row for row in rows if len(row) > 1 and row[1][:1].isdigit()]


def _docker_info(docker: Ran) -> dict[str, Any]:
    try:
        info = json.loads(docker.stdout)
    except ValueError:
        return {}
    return info if isinstance(info, dict) else {}


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
