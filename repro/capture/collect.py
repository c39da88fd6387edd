"""Wait until nsys has written its reports on the node of a GPU stage, and fetch them from there.

Runs in the driver of a connected Ray. A small actor on the node looks at its processes and files, so the node may be
another machine. Whose processes: those with the capture's report in an argument (nsys itself, and the importer that
writes the report) and the agent of each. They are only looked at, never ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import psutil

from repro.device.node_folder import report_folder
from repro.errors import MachineError, WaitTimeoutError
from repro.results import whole_file

IDLE_LIMIT_S: Final = 60.0
"""nsys is stuck if for this long its reports do not grow and it uses hardly any CPU time."""
IDLE_CPU_SHARE: Final = 0.05
"""More of one core than this is work; the waiting agent of 2023.4 uses less than 1%."""
CALL_LIMIT_S: Final = 60.0
_CHUNK_BYTES: Final = 32 << 20
_POLL_S: Final = 0.2


@dataclass(frozen=True)
class Look:
    """A node at one instant: processes that still write, their CPU time in s, and reports with their size in bytes."""

    writers: tuple[str, ...] = ()
    cpu_s: float = 0.0
    reports: dict[str, int] = field(default_factory=dict)


class Node(Protocol):
    """The node that holds a capture's files."""

    def look(self, stem: str) -> Look: ...

    def read(self, name: str, offset: int) -> bytes:
        """Bytes of a report from ``offset`` on: at most a chunk, nothing at its end."""


class NodeFiles:
    """``Node`` for the machine it runs on. ``folder`` is where Ray's nsight plugin puts reports."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or report_folder()

    def look(self, stem: str) -> Look:
        writers, cpu_s = _writers(str(self._folder / f"{stem}."))
        reports = {}
        for path in self._folder.glob("*"):
            if path.name.startswith(f"{stem}."):
                with contextlib.suppress(FileNotFoundError):
                    reports[path.name] = path.stat().st_size
        return Look(tuple(writers), cpu_s, reports)

    def read(self, name: str, offset: int) -> bytes:
        with (self._folder / Path(name).name).open("rb") as file:
            file.seek(offset)
            return file.read(_CHUNK_BYTES)


class RemoteNode:
    """``Node`` through a Ray actor pinned to ``node_id``. ``MachineError`` if it does not answer."""

    def __init__(self, node_id: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        pinned: Any = NodeAffinitySchedulingStrategy(node_id, soft=False)
        remote: Any = ray.remote(num_cpus=0, scheduling_strategy=pinned)(NodeFiles)
        self._node_id = node_id
        self._actor = remote.remote()

    def look(self, stem: str) -> Look:
        answer: Look = self._call(self._actor.look.remote(stem))
        return answer

    def read(self, name: str, offset: int) -> bytes:
        answer: bytes = self._call(self._actor.read.remote(name, offset))
        return answer

    def _call(self, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference, timeout=CALL_LIMIT_S)
        except ray.exceptions.GetTimeoutError:
            raise WaitTimeoutError(f"Waited {CALL_LIMIT_S:.0f} s for node {self._node_id} to answer.") from None
        except ray.exceptions.RayActorError as error:
            raise MachineError(f"Node {self._node_id}, which holds nsys's reports, is gone: {error}.") from None


def wait_for_reports(
    node: Node,
    stem: str,
    *,
    on_progress: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, int]:
    """Wait until nothing writes reports of ``stem`` any more; report name -> size in bytes.

    ``on_progress`` is called at every step forward.

    There is no limit on the whole: a long export is not stuck. ``WaitTimeoutError`` after ``IDLE_LIMIT_S`` without
    progress, ``MachineError`` if nsys ends without a whole report.
    """
    mark: Look | None = None
    since = clock()
    while True:
        look = node.look(stem)
        if not look.writers:
            break
        working = mark is None or look.cpu_s - mark.cpu_s >= IDLE_CPU_SHARE * IDLE_LIMIT_S
        if working or (mark and (look.reports, look.writers) != (mark.reports, mark.writers)):
            mark, since = look, clock()
            on_progress()
        elif clock() - since > IDLE_LIMIT_S:
            raise WaitTimeoutError(
                f"Waited {IDLE_LIMIT_S:.0f} s without progress for {', '.join(look.writers)} to write the report of "
                f"{stem} ({_listed(look.reports)})."
            )
        sleep(_POLL_S)
    empty = [name for name, size in look.reports.items() if not size]
    if empty or not look.reports:
        raise MachineError(
            f"nsys is gone and its report of {stem} is lost ({_listed(look.reports)}): it was ended while it wrote, or "
            "it never began to collect (ray#60904).",
            remedy="The logs of Ray in the run's logs folder say what ended it; python -m repro flush-race shows why.",
        )
    return look.reports


def fetch(node: Node, reports: Iterable[str], folder: Path) -> list[Path]:
    """Copy ``reports`` from the node into ``folder``."""
    fetched = []
    for name in reports:
        path = folder / Path(name).name
        with whole_file(path) as temporary, temporary.open("wb") as file:
            while chunk := node.read(name, file.tell()):
                file.write(chunk)
        fetched.append(path)
    return fetched


def _listed(reports: dict[str, int]) -> str:
    return ", ".join(f"{name}: {size} bytes" for name, size in sorted(reports.items())) or "no report"


def _writers(prefix: str) -> tuple[list[str], float]:
    """Names and summed CPU time of the processes that write reports whose path begins with ``prefix``."""
    processes = list(_command_lines())
    writing = {pid for pid, (_, _, line) in processes if any(prefix in argument for argument in line)}
    agents = {f"--session-name=profile-{pid}" for pid in writing}
    names, cpu_s = [], 0.0
    for pid, (name, seconds, line) in processes:
        if pid in writing or agents & set(line):
            names.append(name)
            cpu_s += seconds
    return sorted(names), cpu_s


def _command_lines() -> Iterator[tuple[int, tuple[str, float, list[str]]]]:
    for process in psutil.process_iter():
        try:
            with process.oneshot():
                times = process.cpu_times()
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process.pid, (process.name(), times.user + times.system, process.cmdline())
        except psutil.Error:
            continue  # ended meanwhile, or another user's
