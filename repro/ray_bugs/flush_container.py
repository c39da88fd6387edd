"""The flush-race arm whose driver is a container's main process, through the Docker SDK.

Files go in and come out as archives, so that the engine may be a remote one. The container is removed in any case.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from docker.errors import NotFound
from requests.exceptions import RequestException

from repro.capture.nsys import EXPORT_LIMIT_S
from repro.errors import MachineError, WaitTimeoutError
from repro.host.engine import connect, said_clearly
from repro.ray_bugs import flush_driver
from repro.ray_bugs.flush_driver import Config, FileState
from repro.ray_bugs.nsys import STAND_IN
from repro.text import one_line

IMAGE: Final = "gpu-idle-repro"
PLACE: Final = "/flush-race"
FOLDER: Final = "/tmp/fr"
STAND_IN_INSIDE: Final = f"{PLACE}/{STAND_IN.name}"
_SHM: Final = "1g"


class Containers:
    """One image on one engine. ``MachineError`` if no engine answers, the image is not there, or the engine fails."""

    def __init__(self, image: str = IMAGE) -> None:
        self._client = connect()
        try:
            with said_clearly("looking for the image", image):
                self._image = self._client.images.get(image)
        except BaseException:
            self._client.close()
            raise

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def drive(
        self, config: Config, environment: Mapping[str, str], limit_s: float, log: Path
    ) -> Iterator[tuple[str, Any]]:
        """Run the driver to its end; yields its output (JSON lines) and the stopped container for ``fetch``.

        The driver's errors go to ``log``. ``WaitTimeoutError`` if it runs longer than ``limit_s``, ``MachineError``
        if it fails.
        """
        files = {Path(flush_driver.__file__): "flush_driver.py", STAND_IN: STAND_IN.name}
        command = ["python3", f"{PLACE}/flush_driver.py", json.dumps(config)]
        with self._container(command, {name: path.read_bytes() for path, name in files.items()}, environment) as box:
            box.start()
            try:
                status = box.wait(timeout=limit_s)["StatusCode"]
            except RequestException:
                raise WaitTimeoutError(f"the driver in the container did not end within {limit_s:.0f} s") from None
            finally:
                log.write_bytes(box.logs(stdout=False, stderr=True))
            output = box.logs(stdout=True, stderr=False).decode(errors="replace")
            if status:
                last = (log.read_text(errors="replace").strip().splitlines() or ["(it said nothing)"])[-1]
                raise MachineError(f"the driver in the container ended with status {status}: {one_line(last)}")
            yield output, box

    def fetch(self, box: Any, path: str, destination: Path) -> FileState | None:
        """Copy a file out of a container and return its state; None if it is not there."""
        try:
            chunks, status = box.get_archive(path)
        except NotFound:
            return None
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            file = archive.extractfile(archive.getmembers()[0])
            assert file is not None
            destination.write_bytes(file.read())
        return {"bytes": status["size"], "mtime_ns": _nanoseconds(status["mtime"])}

    def names(self, box: Any, folder: str) -> list[str]:
        """Names of the files in a folder of a container, at any depth; none if there is no such folder."""
        try:
            chunks, _ = box.get_archive(folder)
        except NotFound:
            return []
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            return [Path(member.name).name for member in archive if member.isfile()]

    def export_problem(self, report: Path) -> str | None:
        """Why the image's own ``nsys export`` refuses a report; None if it does not."""
        command = ["nsys", "export", "--type=sqlite", "--output=/tmp/report.sqlite", f"{PLACE}/report.nsys-rep"]
        with self._container(command, {"report.nsys-rep": report.read_bytes()}, {}) as box:
            box.start()
            try:
                status = box.wait(timeout=EXPORT_LIMIT_S)["StatusCode"]
            except RequestException:
                return f"nsys export took more than {EXPORT_LIMIT_S:.0f} s"
            said = one_line(box.logs().decode(errors="replace").strip()[-300:])
            return f"nsys export ended with {status}: {said}" if status else None

    @contextmanager
    def _container(
        self, command: list[str], files: Mapping[str, bytes], environment: Mapping[str, str]
    ) -> Iterator[Any]:
        """A container with ``files`` in ``PLACE``; the engine's errors become ``MachineError``."""
        with said_clearly(f"running {command[0]} in a container"):
            box = self._client.containers.create(
                self._image, entrypoint=command[:1], command=command[1:], environment=dict(environment), shm_size=_SHM
            )
            try:
                box.put_archive("/", _archive(files))
                yield box
            finally:
                box.remove(force=True)


def _archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{PLACE.strip('/')}/{name}")
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _nanoseconds(text: str) -> int:
    """An RFC 3339 time with up to nine digits of a second's fraction, as nanoseconds since the epoch."""
    match = re.fullmatch(r"(\d+-\d+-\d+T\d+:\d+:\d+)(?:\.(\d{1,9}))?(Z|[+-]\d+:\d+)", text)
    if not match:
        raise MachineError(f"the Docker engine gave a time that cannot be read: {one_line(text)}")
    whole, fraction, zone = match.groups()
    seconds = datetime.fromisoformat(whole + ("+00:00" if zone == "Z" else zone)).astimezone(timezone.utc).timestamp()
    return int(seconds) * 10**9 + int((fraction or "0").ljust(9, "0"))
