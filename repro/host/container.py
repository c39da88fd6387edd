"""Run a command of the kit in a container: results on the host, output passed on, Ctrl-C forwarded, no left-overs."""

from __future__ import annotations

import codecs
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from docker.errors import APIError
from docker.types import DeviceRequest, Mount

from repro.errors import MachineError
from repro.host.engine import Gpus, connect, require_local, said_clearly, wants_gpu
from repro.preflight import check_folder
from repro.procs import terminate_as_interrupt
from repro.progress import Progress

RESULTS_INSIDE: Final = "/results"
OWNER_LABEL: Final = "repro.owner"
"""Label of our containers: the pid of the process that started one, and removes it."""
STOP_LIMIT_S: Final = 60
"""For the kit in the container to end after Ctrl-C; it takes up to 10 s to end Ray."""


def run(
    command: str,
    flags: list[str],
    *,
    image: str,
    results: Path,
    gpus: Gpus,
    shm_size: str,
    progress: Progress | None = None,
) -> int:
    """Run ``command flags`` of the image's kit and return its exit status.

    The container runs as the calling user, with ``results`` mounted for its results; its stdout and stderr become ours.
    SIGINT and SIGTERM go to the kit, which then has ``STOP_LIMIT_S`` to end; a second one ends it at once. The
    container is removed in any case. ``MachineError`` for whatever keeps it from running.
    """
    progress = progress or Progress()
    check_folder(results, "--results")
    client = connect()
    try:
        require_local(client)
        gpu, why = wants_gpu(client, gpus)
        progress.say(f"Container of {image}, {'with the GPUs' if gpu else 'without a GPU'} ({why}).")
        results.mkdir(parents=True, exist_ok=True)
        with terminate_as_interrupt(), said_clearly(f"running {command} in a container", image):
            container = client.containers.create(
                image,
                [command, *flags],
                user=f"{os.getuid()}:{os.getgid()}",
                mounts=[Mount(RESULTS_INSIDE, str(results.resolve()), type="bind")],
                device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])] if gpu else None,
                shm_size=shm_size,
                labels={OWNER_LABEL: str(os.getpid())},
                environment={"CI": os.environ["CI"]} if os.environ.get("CI") else {},
            )
            try:
                return _followed(container)
            finally:
                container.remove(force=True, v=True)
    finally:
        client.close()


def _followed(container: Any) -> int:
    """Start the container, pass its output on until it ends, and return its status."""
    output = container.attach(stream=True, demux=True)
    reader = _Reader(output)
    try:
        reader.start()
        container.start()
        _wait(reader)
    except KeyboardInterrupt:
        _stop(container, reader)
        raise
    status = container.wait()["StatusCode"]
    container.reload()
    if status and container.attrs["State"].get("OOMKilled"):
        raise MachineError(
            "The kernel ended the container: out of memory.", remedy="Give it more, or make runs smaller (--payload)."
        )
    return int(status)


def _stop(container: Any, reader: _Reader) -> None:
    """Let the kit end as on Ctrl-C, and kill it if it does not, or on another interrupt."""
    with suppress(APIError):  # it has ended, or not begun
        try:
            container.kill(signal="SIGINT")
            reader.ended.wait(STOP_LIMIT_S)
        except KeyboardInterrupt:
            pass
        if not reader.ended.is_set():
            container.kill()
            reader.ended.wait(STOP_LIMIT_S)


def _wait(reader: _Reader) -> None:
    while not reader.ended.wait(0.5):
        pass  # in steps, because a signal that another thread was given is handled only between two waits
    if reader.error:
        raise reader.error


class _Reader(threading.Thread):
    """Copies the container's output to ours until it ends.

    ``ended`` says when: an interrupted ``join`` takes a thread for ended that is not (Python 3.11).
    """

    def __init__(self, output: Any) -> None:
        super().__init__(daemon=True, name="container output")
        self._output = output
        self.ended = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in range(2)]
        try:
            for chunks in self._output:
                for stream, decoder, chunk in zip((sys.stdout, sys.stderr), decoders, chunks, strict=True):
                    stream.write(decoder.decode(chunk or b""))
                    stream.flush()
        except Exception as error:  # handed to the thread that waits
            self.error = error
        finally:
            self.ended.set()
