"""Build the image with the ``docker build`` command and BuildKit.

Not with the SDK: the engine's build API, all that the SDK speaks, reaches the classic builder only. That one knows no
cache or secret mounts, and builds every stage of the Dockerfile, the one that compiles Ray included.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Final

import repro
from repro.capture.machine import revision
from repro.errors import InputError, KitError, MachineError
from repro.host.engine import meaning
from repro.procs import running, terminate_as_interrupt

SOURCE: Final = Path(repro.__file__).resolve().parent.parent
_TAIL_LINES: Final = 60
_BUILDER_SPEAKS: Final = re.compile(r"(#\d+ )?(error|executor failed)", re.IGNORECASE)


def build(image: str, *, arguments: dict[str, str] | None = None, flags: list[str] | None = None) -> None:
    """Build ``image`` from this source tree; the builder's progress goes to stderr as it comes.

    ``arguments``: the Dockerfile's ARGs by name; ``flags``: more flags of ``docker build``. The variable ``DOCKER``
    names another docker command. ``InputError`` outside a source tree, ``MachineError`` with what the builder said.
    """
    docker = os.environ.get("DOCKER", "docker")
    if shutil.which(docker) is None:
        raise MachineError(f"There is no {docker} command.", remedy="Install Docker Engine with its command line.")
    if not (SOURCE / "Dockerfile").exists():
        raise InputError(f"{SOURCE} holds no Dockerfile.", remedy="Build from a checkout of the kit.")
    said: deque[str] = deque(maxlen=_TAIL_LINES)
    command = build_command(docker, image, arguments or {}, flags or [])
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    with (
        terminate_as_interrupt(),
        running(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as tree,
    ):
        assert tree.root.stdout
        for line in tree.root.stdout:
            sys.stderr.write(line)
            said.append(line.strip())
        status = tree.root.wait()
    if status:
        raise _failure(image, list(said))


def build_command(docker: str, image: str, arguments: dict[str, str], flags: list[str]) -> list[str]:
    """The ``docker build`` command of the image; the source's revision is one of its arguments."""
    given = {"KIT_REVISION": revision() or "unknown", **arguments}
    options = [f"--build-arg={name}={value}" for name, value in given.items()]
    return [docker, "build", "--progress=plain", *options, *flags, f"--tag={image}", str(SOURCE)]


def _failure(image: str, said: list[str]) -> KitError:
    """The error for a build's last lines, from those in which the builder itself speaks, not the step that failed."""
    own = [line for line in said if _BUILDER_SPEAKS.match(line) or "docker daemon" in line.lower()]
    error = meaning(f"building {image}", "; ".join(own or said[-1:]) or "it said nothing")
    error.remedy = error.remedy or "The lines above are the builder's own."
    return error
