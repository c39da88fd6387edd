"""The Docker engine through its SDK: connect to it, and say each of its failures as one error with its remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

from docker.errors import APIError, DockerException, ImageNotFound
from requests.exceptions import RequestException

import docker
from repro.capture.machine import nvidia_traces
from repro.errors import KitError, MachineError, UsageError
from repro.text import one_line

ENGINE_LIMIT_S: Final = 60
"""For each answer of the engine; output of a container may be silent for longer."""

Gpus = Literal["auto", "all", "none"]

_NO_GPU: Final = "no sign of an NVIDIA GPU on this machine"
_NO_TOOLKIT: Final = (
    "the engine cannot give a container a GPU: it does not know the NVIDIA Container Toolkit",
    "Install nvidia-container-toolkit, run nvidia-ctk runtime configure --runtime=docker and restart docker; "
    "or run without a GPU: --gpus=none.",
)
# What the engine, the container toolkit and BuildKit say (parts of their messages, lower case), and what that means.
_MEANINGS: Final = (
    (
        ("could not select device driver", "unknown or invalid runtime name: nvidia", "unresolvable cdi devices"),
        *_NO_TOOLKIT,
    ),
    (
        ("unsatisfied condition: cuda", "unsatisfied condition: driver"),
        "the NVIDIA driver is too old for the image's CUDA",
        "CUDA 13 needs driver 580 or newer; or run without a GPU: --gpus=none.",
    ),
    (
        ("nvidia-container-cli: initialization error", "nvml error", "driver rpc error", "driver not loaded"),
        "the NVIDIA driver of this machine does not work",
        "nvidia-smi must work here first (after an update of the driver: reboot); or: --gpus=none.",
    ),
    (
        ("no space left on device",),
        "the engine's disk is full",
        "docker system df says what takes it; docker builder prune and docker image prune give it back.",
    ),
    (
        ("permissionerror", "permission denied while trying to connect"),
        "this user may not talk to the Docker engine",
        "Join the docker group (sudo usermod -aG docker $USER) and log in again, or use sudo.",
    ),
    (
        ("buildx component is missing",),
        "this docker command has no BuildKit",
        "Install the docker-buildx plugin, or name another docker command: DOCKER=/usr/bin/docker.",
    ),
    (
        ("cannot connect", "connection refused", "connection aborted", "is the docker daemon"),
        "no Docker engine answers",
        "Install Docker Engine, or start it: systemctl start docker. DOCKER_HOST names another one.",
    ),
)


def connect() -> Any:
    """A client of the engine that ``DOCKER_HOST`` names, or of this machine's; ``MachineError`` if none answers."""
    with said_clearly("connecting to the Docker engine"):
        client = docker.from_env(timeout=ENGINE_LIMIT_S)
        try:
            client.ping()
        except BaseException:
            client.close()
            raise
    return client


@contextmanager
def said_clearly(doing: str, image: str = "") -> Iterator[None]:
    """Turn the SDK's errors inside the block into ``MachineError``; ``doing`` is what was being done."""
    try:
        yield
    except ImageNotFound:
        raise MachineError(
            f"{doing}: the engine has no image {image}.", remedy="Build it: make image; or name another with --image."
        ) from None
    except APIError as error:
        raise meaning(doing, str(error.explanation or error)) from None
    except (DockerException, RequestException) as error:
        raise meaning(doing, str(error)) from None


def meaning(doing: str, message: str) -> KitError:
    """The error for a message of the engine; one that is not known is quoted."""
    lower = message.lower()
    for parts, what, remedy in _MEANINGS:
        if any(part in lower for part in parts):
            return MachineError(f"{doing}: {what} ({one_line(message).strip()[:300]}).", remedy=remedy)
    return MachineError(f"{doing}: {one_line(message).strip()[:600]}")


def gpu_problem(client: Any) -> str | None:
    """Why a container on this engine gets no GPU, as far as can be seen without starting one; None if it gets one."""
    if not nvidia_traces():
        return _NO_GPU
    with said_clearly("asking the engine about GPUs"):
        info = client.info()
    devices = [device.get("ID", "") for device in info.get("DiscoveredDevices") or ()]
    if "nvidia" in info.get("Runtimes", {}) or any(name.startswith("nvidia.com/gpu") for name in devices):
        return None
    return "the engine does not know the NVIDIA Container Toolkit"


def no_gpu_container() -> str | None:
    """Why this machine runs the kit in no container with a GPU: no GPU, no engine, no toolkit; None if it can."""
    if not nvidia_traces():
        return _NO_GPU
    try:
        client = connect()
    except MachineError as error:
        return str(error)
    try:
        return gpu_problem(client)
    finally:
        client.close()


def wants_gpu(client: Any, gpus: Gpus) -> tuple[bool, str]:
    """Whether to ask the engine for the GPUs, and why. ``auto`` never leaves out a GPU that is there in silence."""
    if gpus != "auto":
        return gpus == "all", "asked for"
    problem = gpu_problem(client)
    if problem is None:
        return True, "this machine has one, and the engine the NVIDIA toolkit"
    if nvidia_traces():
        what, remedy = _NO_TOOLKIT
        raise MachineError(f"{what}.", remedy=remedy)
    return False, problem


def require_local(client: Any) -> None:
    """``UsageError`` for an engine on another machine: it could not mount the folder for the results."""
    base = client.api.base_url
    if not base.startswith(("http+docker://localhost", "http+docker://localunixsocket", "http+unix://")):
        raise UsageError(
            f"The Docker engine {os.environ.get('DOCKER_HOST', base)} is on another machine, where results/ is not.",
            remedy="Run the kit there.",
        )
