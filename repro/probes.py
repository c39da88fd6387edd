"""Facts about this machine for the doctor, each had without importing Ray or torch and with a limit on every wait.

Nothing here judges: a probe returns what it saw, or says that it could not look. :mod:`repro.doctor` draws conclusions.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil

from repro import ray_patches
from repro.capture.machine import nvidia_traces
from repro.device.cuda import kernel_driver
from repro.errors import KitError
from repro.procs import leftovers

COMMAND_LIMIT_S = 10.0
CUDA_LIMIT_S = 20.0
"""Creating the driver's state on a machine with many GPUs takes seconds; with a broken driver it can take for ever."""
COPIES_LIMIT_S = 60.0

# A child of its own, because a broken driver can hang or crash the process that initialises it.
_CUDA_PROBE = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(status, ctypes.byref(text))
        raise SystemExit(f"{name} returns {status} ({(text.value or b'unknown').decode()})")
version, count, names = ctypes.c_int(), ctypes.c_int(), []
call("cuInit", 0)
call("cuDriverGetVersion", ctypes.byref(version))
call("cuDeviceGetCount", ctypes.byref(count))
for number in range(count.value):
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    call("cuDeviceGet", ctypes.byref(device), number)
    call("cuDeviceGetName", name, 256, device)
    names.append(name.value.decode(errors="replace"))
print(json.dumps({"version": version.value, "names": names}))
"""


@dataclass(frozen=True)
class Ran:
    """How a command ended. ``status`` is None if it did not start or not end in time; ``problem`` says which."""

    status: int | None
    stdout: str = ""
    problem: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 0


@dataclass(frozen=True)
class Cuda:
    """What libcuda says: ``version`` as it counts (13000 is CUDA 13.0), and the names of the devices it shows."""

    version: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """How the first GPU is connected to the host: generation and lanes of PCIe at most, and whether by NVLink-C2C."""

    pcie_generation: int
    pcie_lanes: int
    c2c: bool = False


@dataclass(frozen=True)
class Disk:
    """The file system that a folder is on."""

    folder: str
    free_bytes: int
    used_pct: float


@dataclass(frozen=True)
class RayFacts:
    """The Ray that would be imported: the state of each patch, or why the series cannot be on it."""

    folder: str | None = None
    version: str | None = None
    patches: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    writable: bool = True
    error: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything the doctor looks at. None means that there is no such thing here."""

    python: tuple[int, int]
    nvidia_traces: tuple[str, ...]
    cuda: Cuda | str
    """Or why libcuda cannot be used."""
    nvidia_smi: Ran | None
    """A line for each GPU: name, driver version, MIG mode."""
    kernel_driver: str | None
    """Version of the loaded NVIDIA kernel driver."""
    torch: tuple[str, str | None] | None
    """Version of torch, and the CUDA version it is built for."""
    nsys: Ran | None
    ray: RayFacts
    shm: Disk | None
    disks: tuple[Disk, ...]
    """Of the current folder, where results go, and of the folder for Ray's temporary files."""
    perf_event_paranoid: int | None
    leftovers: tuple[tuple[int, str], ...]
    """Pid and command line of processes of runs that are gone."""
    docker: Ran | None
    """``docker info`` as JSON."""
    nvidia_toolkit: str | None
    compiler: Ran | None
    link: Link | None = None
    copies: Ran | None = None
    """The copy benchmark; None where it was not run."""


def gather(*, benchmark: bool = False) -> Facts:
    """Look at this machine. Takes about a second; at most ``CUDA_LIMIT_S`` where a command hangs.

    ``benchmark`` measures copies where there is a GPU, which takes some ten seconds more.
    """
    torch = _torch()
    with ThreadPoolExecutor() as pool:
        cuda = pool.submit(cuda_devices)
        smi = pool.submit(
            _tool, "nvidia-smi", "--query-gpu=name,driver_version,mig.mode.current", "--format=csv,noheader"
        )
        nsys = pool.submit(_tool, "nsys", "--version")
        docker = pool.submit(_tool, "docker", "info", "--format", "{{json .}}")
        compiler = pool.submit(_tool, "g++", "--version")
        link = pool.submit(_link)
        copies = None
        if benchmark and torch and torch[1] and isinstance(cuda.result(), Cuda):
            copies = ran([sys.executable, "-m", "repro.workload.calibrate"], COPIES_LIMIT_S)
        return Facts(
            python=sys.version_info[:2],
            nvidia_traces=tuple(nvidia_traces()),
            ray=_ray(),
            torch=torch,
            kernel_driver=kernel_driver(),
            shm=disk(Path("/dev/shm")),
            disks=tuple(filter(None, (disk(Path.cwd()), disk(Path(tempfile.gettempdir()))))),
            perf_event_paranoid=_number(Path("/proc/sys/kernel/perf_event_paranoid")),
            leftovers=tuple(_leftovers()),
            nvidia_toolkit=shutil.which("nvidia-container-runtime") or shutil.which("nvidia-ctk"),
            cuda=cuda.result(),
            nvidia_smi=smi.result(),
            nsys=nsys.result(),
            docker=docker.result(),
            compiler=compiler.result(),
            link=link.result(),
            copies=copies,
        )


def ran(argv: Sequence[str], limit_s: float = COMMAND_LIMIT_S) -> Ran:
    """Run a command to its end or for ``limit_s``; never waits longer, not even for a process that cannot be killed."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
        except OSError as error:
            return Ran(None, problem=f"{argv[0]} does not start: {error.strerror}")
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Ran(None, problem=f"{argv[0]} gave no answer within {limit_s:g} s{_ended(process)}")
        except BaseException:
            _ended(process)
            raise
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace").strip())
    if status < 0:
        return Ran(status, texts[0], f"{argv[0]} was ended by {signal.Signals(-status).name}")
    return Ran(status, texts[0], "" if status == 0 else texts[1] or texts[0] or f"{argv[0]} ended with status {status}")


def disk(folder: Path) -> Disk | None:
    """Space on the file system of ``folder`` for this user; None if there is no such folder."""
    try:
        usage = psutil.disk_usage(str(folder))
    except OSError:
        return None
    return Disk(str(folder), usage.free, usage.percent)


def _ended(process: subprocess.Popen[bytes]) -> str:
    """Kill a process with its group; what to add to a message if that did not do it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(1.0)
    except ProcessLookupError:
        pass
    except subprocess.TimeoutExpired:
        return f" and cannot be ended (pid {process.pid}, probably waiting for the driver)"
    return ""


def _tool(name: str, *arguments: str) -> Ran | None:
    path = shutil.which(name)
    return ran([path, *arguments]) if path else None


def cuda_devices() -> Cuda | str:
    """What libcuda shows, without NVML; or why it cannot be used."""
    child = ran([sys.executable, "-I", "-c", _CUDA_PROBE], CUDA_LIMIT_S)
    if not child.ok:
        return child.problem.splitlines()[-1].removeprefix("OSError: ")
    found = json.loads(child.stdout)
    return Cuda(found["version"], tuple(found["names"]))


def _link() -> Link | None:
    """None where nvidia-smi does not say."""
    pcie = _tool("nvidia-smi", "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader,nounits")
    match = re.match(r"(\d+), *(\d+)", pcie.stdout) if pcie and pcie.ok else None
    if not match:
        return None
    details = _tool("nvidia-smi", "-q")
    c2c = bool(details and re.search(r"C2C Mode\s*:\s*Enabled", details.stdout))
    return Link(int(match[1]), int(match[2]), c2c)


def _ray() -> RayFacts:
    try:
        folder = ray_patches.find_ray()
        version = ray_patches.ray_version(folder)
    except KitError as error:
        return RayFacts(error=error.message, remedy=error.remedy)
    try:
        found = ray_patches.status(folder)
    except KitError as error:
        return RayFacts(str(folder), version, error=error.message, remedy=error.remedy)
    return RayFacts(
        str(folder),
        version,
        {one.patch.name: one.state for one in found.patches},
        tuple(found.problems()),
        writable=all(os.access((folder / path).parent, os.W_OK) for one in found.patches for path in one.files),
    )


def _torch() -> tuple[str, str | None] | None:
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    built_for = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return metadata.version("torch"), built_for[1] if built_for else None


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _leftovers() -> list[tuple[int, str]]:
    found = []
    for process in leftovers():
        try:
            found.append((process.pid, " ".join(process.cmdline()) or process.name()))
        except psutil.Error:
            continue
    return found
