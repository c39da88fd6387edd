"""The host side of the container on a fake engine: each failure with its remedy, and what is asked of the engine."""

from __future__ import annotations

import io
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, DockerException, ImageNotFound
from rich.console import Console

from repro.cli import main
from repro.errors import InputError, KitError, MachineError, UsageError
from repro.host import build, container, engine
from repro.progress import Progress

NVIDIA = {"Runtimes": {"runc": {}, "nvidia": {}}}


class FakeContainer:
    """Says two lines and ends with ``status``; with ``endless`` it runs until it is told to end."""

    def __init__(self) -> None:
        self.status = 0
        self.oom = False
        self.endless = False
        self.deaf = False
        self.start_error: Exception | None = None
        self.signals: list[str] = []
        self.removed = False
        self.on_output = lambda: None
        self._started, self._ended = threading.Event(), threading.Event()

    def attach(self, **options: Any) -> Iterator[tuple[bytes | None, bytes | None]]:
        assert options == {"stream": True, "demux": True}
        return self._output()

    def _output(self) -> Iterator[tuple[bytes | None, bytes | None]]:
        if not self._started.wait(20):
            return
        yield "20 µs".encode()[:4], None  # ends in the middle of a character
        yield "20 µs\n".encode()[4:], b"progress\n"
        self.on_output()
        if self.endless:
            assert self._ended.wait(20)

    def start(self) -> None:
        if self.start_error:
            raise self.start_error
        self._started.set()

    def kill(self, signal: str = "SIGKILL") -> None:
        self.signals.append(signal)
        if signal == "SIGKILL" or not self.deaf:
            self._ended.set()

    def wait(self) -> dict[str, int]:
        return {"StatusCode": self.status}

    def reload(self) -> None:
        self.attrs = {"State": {"OOMKilled": self.oom}}

    def remove(self, force: bool, v: bool) -> None:
        assert force and v
        self.removed = True


class FakeEngine:
    """Stands for ``docker.DockerClient``."""

    def __init__(self) -> None:
        self.api = SimpleNamespace(base_url="http+docker://localhost")
        self.containers = self
        self.box = FakeContainer()
        self.facts: dict[str, Any] = {"Runtimes": {"runc": {}}}
        self.ping_error: Exception | None = None
        self.create_error: Exception | None = None
        self.asked: dict[str, Any] = {}
        self.closed = False

    def ping(self) -> None:
        if self.ping_error:
            raise self.ping_error

    def info(self) -> dict[str, Any]:
        return self.facts

    def create(self, image: str, command: list[str], **options: Any) -> FakeContainer:
        if self.create_error:
            raise self.create_error
        self.asked = {"image": image, "command": command, **options}
        return self.box

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(engine.docker, "from_env", lambda timeout: fake)
    monkeypatch.setattr(engine, "nvidia_traces", list)
    return fake


def run(results: Path, gpus: engine.Gpus = "auto") -> int:
    progress = Progress(Console(file=io.StringIO()))
    return container.run(
        "reproduce", ["--blocks=4"], image="kit", results=results, gpus=gpus, shm_size="3g", progress=progress
    )


def api_error(text: str) -> APIError:
    return APIError("500 Server Error", explanation=text)


def test_what_is_asked_of_the_engine(docker: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docker.box.status = 4
    results = tmp_path / "results"
    assert run(results) == 4
    assert docker.asked["command"] == ["reproduce", "--blocks=4"]
    assert docker.asked["user"] == f"{os.getuid()}:{os.getgid()}"
    assert docker.asked["shm_size"] == "3g"
    assert docker.asked["device_requests"] is None
    (mount,) = docker.asked["mounts"]
    assert (mount["Source"], mount["Target"], mount["Type"]) == (str(results), "/results", "bind")
    assert results.is_dir()
    assert capsys.readouterr() == ("20 µs\n", "progress\n")
    assert docker.box.removed and docker.closed


def test_the_gpus_are_asked_for_where_there_are_some(
    docker: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "nvidia_traces", lambda: ["/dev/nvidia0"])
    docker.facts = NVIDIA
    run(tmp_path)
    (request,) = docker.asked["device_requests"]
    assert (request["Count"], request["Capabilities"]) == (-1, [["gpu"]])
    run(tmp_path, gpus="none")
    assert docker.asked["device_requests"] is None
    docker.facts = {"Runtimes": {}, "DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}
    run(tmp_path)
    assert docker.asked["device_requests"]


def test_a_gpu_that_a_container_cannot_get_is_an_error(
    docker: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "nvidia_traces", lambda: ["/dev/nvidia0"])
    with pytest.raises(MachineError, match="does not know the NVIDIA Container Toolkit") as caught:
        run(tmp_path)
    assert "nvidia-ctk runtime configure" in caught.value.remedy
    assert not docker.asked


START_FAILURES = [
    ('could not select device driver "" with capabilities: [[gpu]]', "NVIDIA Container Toolkit", "nvidia-ctk"),
    ("nvidia-container-cli: requirement error: unsatisfied condition: cuda>=13.0", "driver is too old", "580"),
    (
        "nvidia-container-cli: initialization error: nvml error: driver not loaded",
        "driver of this machine",
        "nvidia-smi",
    ),
    ("write /var/lib/docker/x: no space left on device", "disk is full", "docker builder prune"),
    ("something new\x1b[31m", "something new\ufffd", ""),
]


@pytest.mark.parametrize(("text", "message", "remedy"), START_FAILURES)
def test_a_failure_at_the_start(docker: FakeEngine, tmp_path: Path, text: str, message: str, remedy: str) -> None:
    docker.box.start_error = api_error(text)
    with pytest.raises(MachineError, match="running reproduce in a container: ") as caught:
        run(tmp_path, gpus="all")
    assert message in caught.value.message
    assert remedy in caught.value.remedy
    assert docker.box.removed and docker.closed


def test_a_missing_image(docker: FakeEngine, tmp_path: Path) -> None:
    docker.create_error = ImageNotFound("404", explanation="No such image: kit")
    with pytest.raises(MachineError, match="the engine has no image kit") as caught:
        run(tmp_path)
    assert "make image" in caught.value.remedy
    assert docker.closed


CONNECT_FAILURES = [
    ("('Connection aborted.', FileNotFoundError(2, 'No such file or directory'))", "no Docker engine", "systemctl"),
    ("Failed to establish a new connection: [Errno 111] Connection refused", "no Docker engine", "systemctl"),
    ("('Connection aborted.', PermissionError(13, 'Permission denied'))", "may not talk", "docker group"),
]


@pytest.mark.parametrize(("text", "message", "remedy"), CONNECT_FAILURES)
@pytest.mark.parametrize("while_pinging", [False, True])
def test_no_engine(
    docker: FakeEngine, monkeypatch: pytest.MonkeyPatch, while_pinging: bool, text: str, message: str, remedy: str
) -> None:
    failure = DockerException(f"Error while fetching server API version: {text}")
    if while_pinging:
        docker.ping_error = failure
    else:

        def fail(timeout: int) -> None:
            raise failure

        monkeypatch.setattr(engine.docker, "from_env", fail)
    with pytest.raises(MachineError) as caught:
        engine.connect()
    assert message in caught.value.message
    assert remedy in caught.value.remedy
    assert docker.closed == while_pinging


def test_a_results_folder_that_cannot_be_written(docker: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="cannot be written") as caught:
        run(tmp_path / "file" / "results")
    assert "--results" in caught.value.remedy
    assert not docker.asked


def test_an_engine_elsewhere_cannot_mount_our_folder(docker: FakeEngine, tmp_path: Path) -> None:
    docker.api.base_url = "http://10.0.0.1:2375"
    with pytest.raises(UsageError, match="on another machine"):
        run(tmp_path)


def test_out_of_memory(docker: FakeEngine, tmp_path: Path) -> None:
    docker.box.status, docker.box.oom = 137, True
    with pytest.raises(MachineError, match="out of memory"):
        run(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_forwarded(docker: FakeEngine, tmp_path: Path, number: signal.Signals) -> None:
    docker.box.endless = True
    docker.box.on_output = lambda: os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert docker.box.signals == ["SIGINT"]
    assert docker.box.removed


def test_a_kit_that_does_not_end_is_killed(docker: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "STOP_LIMIT_S", 0.1)
    docker.box.endless = docker.box.deaf = True
    docker.box.on_output = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert docker.box.signals == ["SIGINT", "SIGKILL"]
    assert docker.box.removed


def test_the_command_line_passes_flags_on(
    docker: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    docker.box.status = 1
    assert main(["host", "reproduce", "--args=--profiles=inline --out='a b'"]) == 1
    assert docker.asked["command"] == ["reproduce", "--profiles=inline", "--out=a b"]
    assert main(["host", "report"]) == 1
    assert docker.asked["command"] == ["report"]
    assert main(["host", "reproduce", "--args='"]) == 2
    assert "--args=': No closing quotation" in capsys.readouterr().err


def test_check_says_why_there_is_no_gpu_in_a_container(
    docker: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docker.ping_error = DockerException("Connection refused")
    assert main(["host", "check"]) == 3
    assert "no sign of an NVIDIA GPU" in capsys.readouterr().out
    monkeypatch.setattr(engine, "nvidia_traces", lambda: ["/dev/nvidia0"])
    assert main(["host", "check"]) == 3
    assert "no Docker engine answers" in capsys.readouterr().out
    docker.ping_error = None
    assert main(["host", "check"]) == 3
    assert "NVIDIA Container Toolkit" in capsys.readouterr().out
    docker.facts = NVIDIA
    assert main(["host", "check"]) == 0


def test_the_build_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "revision", lambda: "abc")
    command = build.build_command("docker", "kit", {"RAY_BUILD": "source"}, ["--network=host"])
    assert command[:3] == ["docker", "build", "--progress=plain"]
    assert {"--build-arg=KIT_REVISION=abc", "--build-arg=RAY_BUILD=source", "--network=host", "--tag=kit"} < set(
        command
    )
    assert (Path(command[-1]) / "Dockerfile").exists()


BUILD_FAILURES = [
    ("ERROR: failed to solve: write /x: no space left on device", "disk is full", "docker system df"),
    (
        "ERROR: Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?",
        "no Docker",
        "systemctl",
    ),
    ("permission denied while trying to connect to the Docker daemon socket", "may not talk", "docker group"),
    ("ERROR: BuildKit is enabled but the buildx component is missing or broken.", "no BuildKit", "buildx"),
    ("#9 ERROR: executor failed running [pip install]: exit code: 1", "exit code: 1", "builder's own"),
    ("#9 1.5 pip: Connection refused\n#9 ERROR: executor failed: exit code: 1", "exit code: 1", "builder's own"),
]


def _stand_in(folder: Path, text: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = folder / "docker"
    docker.write_text(
        f"#!{sys.executable}\nimport os, sys\nprint(os.environ['DOCKER_BUILDKIT'])\n"
        f"print({text!r}, file=sys.stderr)\nsys.exit({status})\n"
    )
    docker.chmod(docker.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("DOCKER", str(docker))


@pytest.mark.parametrize(("text", "message", "remedy"), BUILD_FAILURES)
def test_a_failed_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str, remedy: str) -> None:
    _stand_in(tmp_path, text, 1, monkeypatch)
    with pytest.raises(KitError, match="building kit") as caught:
        build.build("kit")
    assert message in caught.value.message
    assert remedy in caught.value.remedy


def test_a_build_streams_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _stand_in(tmp_path, "#1 DONE", 0, monkeypatch)
    build.build("kit")
    assert sorted(capsys.readouterr().err.splitlines()) == ["#1 DONE", "1"]


def test_a_build_needs_docker_and_a_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER", str(tmp_path / "docker"))
    with pytest.raises(MachineError, match="There is no "):
        build.build("kit")
    _stand_in(tmp_path, "", 0, monkeypatch)
    monkeypatch.setattr(build, "SOURCE", tmp_path)
    with pytest.raises(InputError, match="holds no Dockerfile"):
        build.build("kit")
