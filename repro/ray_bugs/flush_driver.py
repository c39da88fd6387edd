"""The Ray driver of one flush-race repeat: profiled actors, then a teardown. Needs Ray and the standard library only.

A process of its own (``python flush_driver.py CONFIG``; CONFIG is JSON, see ``Config``), so that each repeat has its
cluster to itself and a copy of this one file runs in any container that has Ray. It writes one JSON object a line to
its standard output, each with a ``phase`` and ``at_s`` (monotonic), the last one when ``ray.shutdown()`` returned, and
ends at once.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypedDict

READ_BYTES = 16
RAY = "ray"
"""Ray's temporary folder, in the repeat's."""
TEMPORARY = "tmp"
"""TMPDIR of the repeat: nsys keeps its raw stream there while it writes."""


class Config(TypedDict):
    """``events``: traced system calls an actor. ``folder``: for what the repeat writes, short (it holds sockets).

    ``stand_in``: the stand-in for nsys to put on PATH, empty to use the nsys that is there.
    """

    teardown: str
    actors: int
    events: int
    nsight: dict[str, str]
    folder: str
    stand_in: str
    start_limit_s: float
    work_limit_s: float
    wait_limit_s: float


class FileState(TypedDict):
    bytes: int
    mtime_ns: int


def snapshot(directory: Path) -> dict[str, FileState]:
    """Reports and raw streams of nsys in ``directory`` by file name, as they are now."""
    found: dict[str, FileState] = {}
    for path in directory.glob("*"):
        if path.suffix in (".nsys-rep", ".qdstrm") and path.stem != "empty":  # the plugin's own trial report
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            found[path.name] = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    return found


def _say(phase: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"phase": phase, "at_s": time.monotonic(), **facts}) + "\n")
    sys.stdout.flush()


def _prepare(folder: Path, stand_in: str) -> None:
    """PATH and TMPDIR for every process of the repeat.

    ``python`` is this interpreter by a script: stock Ray starts the bare name under nsys, and a link would not find
    its virtual environment.
    """
    programs = folder / "bin"
    programs.mkdir(parents=True)
    python = programs / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    if stand_in:
        subprocess.run([sys.executable, "-I", "-S", stand_in, "--install", str(programs)], check=True, timeout=30)
    os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    temporary = folder / TEMPORARY
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)


def _stat(pid: int) -> tuple[str, str, int] | None:
    """(name, state, parent) of a process, None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    name = text[text.index("(") + 1 : text.rindex(")")]
    state, parent = text.rpartition(")")[2].split()[:2]
    return name, state, int(parent)


def _profiler_of(worker: int) -> int | None:
    """The process between the raylet and a profiled worker: the one that writes the report."""
    pid = worker
    while (process := _stat(pid)) and process[2] > 1:
        parent = _stat(process[2])
        if parent and parent[0] == "raylet":
            return pid
        pid = process[2]
    return None


def _wait_until_gone(pids: list[int], limit_s: float) -> list[int]:
    """Wait for processes that are not our children; the ones still running after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    left = list(pids)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [pid for pid in left if (process := _stat(pid)) and process[1] != "Z"]
    return left


class _Worker:
    """What is profiled: traced reads with an NVTX range around each thousand, and kernels where there is a GPU."""

    def pid(self) -> int:
        return os.getpid()

    def work(self, events: int) -> dict[str, Any]:
        """Make ``events`` traced reads; what took part."""
        try:
            import nvtx
        except ImportError:
            nvtx = None
        kernels = 0
        matrix = None
        if os.environ.get("CUDA_VISIBLE_DEVICES"):
            try:
                import torch

                matrix = torch.ones(64, 64, device="cuda")
            except (ImportError, RuntimeError):
                matrix = None
        file = os.open("/dev/zero", os.O_RDONLY)
        try:
            for start in range(0, events, 1000):
                if nvtx:
                    nvtx.push_range("reads")
                for _ in range(min(1000, events - start)):
                    os.pread(file, READ_BYTES, 0)
                if matrix is not None:
                    for _ in range(100):
                        matrix = matrix @ matrix / 64
                    kernels += 200
                if nvtx:
                    nvtx.pop_range()
        finally:
            os.close(file)
        return {"reads": events, "nvtx": nvtx is not None, "kernels": kernels}


def main(config: Config) -> None:
    """Run one repeat; any error ends the process with a traceback and its status."""
    import ray

    folder = Path(config["folder"])
    _prepare(folder, config["stand_in"])
    _say("starting Ray")
    context: Any = ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=max(2, config["actors"]),
        object_store_memory=256 * 1024**2,
        log_to_driver=False,
        _temp_dir=str(folder / RAY),
    )
    reports = Path(context.address_info["session_dir"]) / "logs" / "nsight"
    _say("starting the profiled actors", ray=ray.__version__, ray_path=ray.__file__, reports=str(reports))
    gpus = min(1.0, ray.cluster_resources().get("GPU", 0.0)) / config["actors"]
    remote: Any = ray.remote(num_cpus=0, num_gpus=gpus, runtime_env={"nsight": config["nsight"]})(_Worker)
    actors: list[Any] = [remote.remote() for _ in range(config["actors"])]
    workers = ray.get([actor.pid.remote() for actor in actors], timeout=config["start_limit_s"])
    profilers = [_profiler_of(pid) for pid in workers]
    _say("working", workers=workers, profilers=profilers)
    work = ray.get([actor.work.remote(config["events"]) for actor in actors], timeout=config["work_limit_s"])
    _say("worked", work=work)
    if config["teardown"] == "wait":
        for actor in actors:
            actor.__ray_terminate__.remote()
        _say("waiting for the reports")
        left = _wait_until_gone([pid for pid in profilers if pid], config["wait_limit_s"])
        _say("waited", still_running=left)
    started = time.monotonic()
    _say("shutting down", wall_ns=time.time_ns())
    ray.shutdown()
    shutdown_s = time.monotonic() - started
    _say("returned", shutdown_s=shutdown_s, files=snapshot(reports))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
