"""The image as a user has it: every command, every way to run it. ``REPRO_TEST_IMAGE`` names the image.

Through the Docker SDK, so that every container is removed. The image must have nsys; the tests need no GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import docker
from repro.host.container import OWNER_LABEL
from repro.results import RunDir

pytestmark = [pytest.mark.needs("docker"), pytest.mark.timeout(600)]

SMALL = ["reproduce", "--device=emulated", "--profiles=inline,split", "--blocks=4", "--prep-ms=5"]
OTHER = 12345
LIMIT_S = 400
SHM = "3g"
STOP_GRACE_S = 10
"""What docker stop gives by default."""


@dataclass(frozen=True)
class Ended:
    status: int
    output: str


class Engine:
    def __init__(self, image: str) -> None:
        self.image = image
        self.client = docker.from_env(timeout=LIMIT_S)

    @contextmanager
    def container(self, command: list[str], **options: Any) -> Iterator[Any]:
        options = {"shm_size": SHM, **options}
        box = self.client.containers.create(self.image, command, **options)
        try:
            box.start()
            yield box
        finally:
            box.remove(force=True, v=True)

    def run(self, command: list[str], **options: Any) -> Ended:
        with self.container(command, **options) as box:
            status = box.wait(timeout=LIMIT_S)["StatusCode"]
            return Ended(status, box.logs().decode(errors="replace"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    image = os.environ.get("REPRO_TEST_IMAGE")
    if not image:
        reason = "REPRO_TEST_IMAGE names no image (make image builds one)"
        if "docker" in os.environ.get("REPRO_REQUIRE", "").split(","):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    made = Engine(image)
    yield made
    made.client.close()


def _mounted(folder: Path) -> dict[str, Any]:
    return {"volumes": {str(folder): {"bind": "/results", "mode": "rw"}}}


def _owned(folder: Path, owner: int) -> Path:
    folder.mkdir()
    os.chown(folder, owner, owner)
    return folder


def _only_run(folder: Path) -> RunDir:
    (run,) = [path for path in folder.iterdir() if path.is_dir()]
    return RunDir(run)


def _captured(folder: Path) -> list[str]:
    """Profiles that the run in ``folder`` has so far."""
    records = [RunDir(path.parent).read() for path in folder.glob("*/run.json")]
    return [capture.profile for record in records for capture in record.captures if capture.file]


def test_without_arguments_it_shows_help(engine: Engine) -> None:
    ended = engine.run([])
    assert ended.status == 0
    assert "Usage: python -m repro COMMAND" in ended.output


def test_doctor_sees_a_patched_ray_and_nsys(engine: Engine) -> None:
    ended = engine.run(["doctor", "--format=json"])
    checks = {check["name"]: check for check in json.loads(ended.output)["checks"]}
    assert ended.status == 0
    assert {name: checks[name]["verdict"] for name in ("python", "ray", "patches", "nsys", "shared memory")} == {
        "python": "ok", "ray": "ok", "patches": "ok", "nsys": "ok", "shared memory": "ok",
    }  # fmt: skip


def test_build_json_names_what_is_in_the_image(engine: Engine) -> None:
    ended = engine.run(["/kit/build.json"], entrypoint=["cat"])
    build = json.loads(ended.output)
    labels = engine.client.images.get(engine.image).labels
    assert build["packages"]["ray"] == "2.58.0"
    assert build["revision"] == labels["org.opencontainers.image.revision"]
    assert build["nsight_source"] == labels["kit.nsight-source"]
    assert set(build["flush_window"]) == {"libprofiler_flush.so", "profiler_flush_warden"}


def test_the_last_stage_has_no_compiler_no_caches_and_a_user(engine: Engine) -> None:
    looked = engine.run(
        ["-c", "command -v gcc g++ make pip; ls -A /root/.cache /var/lib/apt/lists /var/cache/apt"],
        entrypoint=["sh"],
        user="0",
    )
    found = [line for line in looked.output.splitlines() if line and not line.startswith(("ls:", "/var"))]
    assert found == []
    assert engine.client.images.get(engine.image).attrs["Config"]["User"] == "10001"


def test_as_another_user_read_only_and_without_network(engine: Engine, tmp_path: Path) -> None:
    results = _owned(tmp_path / "results", OTHER)
    ended = engine.run(
        SMALL,
        user=f"{OTHER}:{OTHER}",
        read_only=True,
        tmpfs={"/tmp": ""},
        network_mode="none",
        **_mounted(results),
    )
    assert ended.status in (0, 1), ended.output  # 1: a claim is inconclusive on so few batches
    assert "EMULATED" in ended.output
    run = _only_run(results)
    record = run.read()
    assert [(capture.profile, bool(capture.file)) for capture in record.captures] == [("inline", True), ("split", True)]
    assert run.report.exists()
    assert {path.stat().st_uid for path in results.rglob("*")} == {OTHER}
    again = engine.run(["report"], user=f"{OTHER}:{OTHER}", read_only=True, tmpfs={"/tmp": ""}, **_mounted(results))
    assert again.status == 0, again.output


def test_as_the_image_s_own_user_without_a_mount(engine: Engine) -> None:
    ended = engine.run(["reproduce", "--device=emulated", "--profiles=inline", "--blocks=4", "--prep-ms=5"])
    assert ended.status in (0, 1), ended.output
    assert "Report: results/" in ended.output


def test_small_shared_memory_is_an_error_with_the_flag(engine: Engine) -> None:
    ended = engine.run(SMALL, shm_size="64m")
    assert ended.status == 3
    assert "--shm-size=3g" in ended.output
    assert "Starting Ray" not in ended.output


def test_a_temporary_folder_without_programs_is_an_error_with_the_flag(engine: Engine) -> None:
    ended = engine.run(["flush-race"], read_only=True, tmpfs={"/tmp": ""})
    assert ended.status == 3
    assert "--tmpfs /tmp:exec" in ended.output


def test_a_results_folder_of_somebody_else_is_an_error(engine: Engine, tmp_path: Path) -> None:
    results = _owned(tmp_path / "results", 0)
    for command in (SMALL, ["flush-race"], ["nsight-command"]):
        ended = engine.run(command, **_mounted(results))
        assert ended.status == 3, ended.output
        assert "--user $(id -u):$(id -g)" in ended.output
    assert list(results.iterdir()) == []


def test_docker_stop_keeps_finished_profiles_and_the_same_command_continues(engine: Engine, tmp_path: Path) -> None:
    results = _owned(tmp_path / "results", OTHER)
    options = {"user": f"{OTHER}:{OTHER}", **_mounted(results)}
    command = ["reproduce", "--device=emulated", "--profiles=inline,split", "--blocks=64", "--prep-ms=20"]
    with engine.container(command, **options) as box:
        deadline = time.monotonic() + LIMIT_S
        while not _captured(results):
            box.reload()
            assert box.status == "running", box.logs().decode()
            assert time.monotonic() < deadline, "no profile within the limit"
            time.sleep(0.2)
        box.stop(timeout=STOP_GRACE_S)
        box.reload()
        output = box.logs().decode()
        assert box.attrs["State"]["ExitCode"] == 130, output  # 137 if the engine had to kill it
    run = _only_run(results)
    profile = run.profile_path("inline")
    kept = profile.read_bytes()
    assert _captured(results) == ["inline"]
    assert not list(run.root.rglob("*.tmp"))

    continued = engine.run(command, **options)
    assert continued.status in (0, 1), continued.output
    assert _only_run(results).root == run.root
    assert [bool(capture.file) for capture in run.read().captures] == [True, True]
    assert profile.read_bytes() == kept


PROFILED_MAIN_PROCESS = """
import os, signal, sys, time
from pathlib import Path
from repro.ray_patches import flush_window
os.environ |= flush_window.environment(flush_window.build(Path("/kit/build/profiler_flush")))
import ray

def stop(*_):
    ray.shutdown()
    sys.exit(0)

class Worker:
    def work(self):
        file = os.open("/dev/zero", os.O_RDONLY)
        for _ in range(200_000):
            os.pread(file, 16, 0)

ray.init(address="local", include_dashboard=False, num_cpus=2, object_store_memory=256 << 20, log_to_driver=False)
signal.signal(signal.SIGTERM, stop)
nsight = {"t": "osrt", "sample": "none", "cpuctxsw": "none", "osrt-threshold": "0", "o": "/results/stopped"}
worker = ray.remote(num_cpus=0, runtime_env={"nsight": nsight})(Worker).remote()
ray.get(worker.work.remote())
print("worked", flush=True)
time.sleep(600)
"""


def test_docker_stop_waits_for_nsys_in_a_patched_ray(engine: Engine, tmp_path: Path) -> None:
    results = _owned(tmp_path / "results", OTHER)
    options = {"user": f"{OTHER}:{OTHER}", **_mounted(results)}
    with engine.container(["-c", PROFILED_MAIN_PROCESS], entrypoint=["tini", "--", "python"], **options) as box:
        deadline = time.monotonic() + LIMIT_S
        while b"worked" not in box.logs():
            box.reload()
            assert box.status == "running" and time.monotonic() < deadline, box.logs().decode()
            time.sleep(0.5)
        assert not (results / "stopped.nsys-rep").exists()
        box.stop(timeout=120)  # patience for a slow machine; the report is small
        box.reload()
        assert box.attrs["State"]["ExitCode"] == 0, box.logs().decode()
    export = ["export", "--type=sqlite", "--output=/tmp/stopped.sqlite", "/results/stopped.nsys-rep"]
    exported = engine.run(export, entrypoint=["nsys"], **options)
    assert exported.status == 0, exported.output


def test_flush_race_with_real_nsys(engine: Engine, tmp_path: Path) -> None:
    results = _owned(tmp_path / "results", OTHER)
    arms = ["stock+wait", "stock+immediate", "fixed+immediate"]
    ended = engine.run(
        [
            "flush-race",
            f"--arms={','.join(arms)}",
            "--repeats=1",
            "--nsys=real",
            "--report-mb=24",
            "--out=/results/race",
        ],
        user=f"{OTHER}:{OTHER}",
        read_only=True,
        tmpfs={"/tmp": "exec"},
        network_mode="none",
        **_mounted(results),
    )
    found = json.loads((results / "race" / "flush_race.json").read_text())
    assert found["nsys"]["kind"] == "real"
    outcomes = {one["arm"]: (one["error"], one["outcome"]) for one in found["results"]}
    assert set(outcomes) == set(arms)
    # written: nsys export read it, so the importer in the image works
    assert outcomes["stock+wait"] == (None, "written"), ended.output
    assert outcomes["stock+immediate"][1] in ("late", "empty", "missing", "partial"), ended.output
    assert outcomes["fixed+immediate"] == (None, "written"), ended.output
    assert ended.status == 0


def test_flush_race_as_the_container_s_main_process(engine: Engine, tmp_path: Path) -> None:
    out = tmp_path / "race"
    flags = ["--arms=container", "--repeats=1", "--report-mb=24", f"--image={engine.image}", f"--out={out}"]
    subprocess.run([sys.executable, "-m", "repro", "flush-race", *flags], timeout=LIMIT_S, check=False)
    (repeat,) = json.loads((out / "flush_race.json").read_text())["results"]
    assert repeat["error"] is None
    assert repeat["outcome"] in ("empty", "missing", "partial")


def test_nsight_command_with_real_nsys(engine: Engine, tmp_path: Path) -> None:
    results = _owned(tmp_path / "results", OTHER)
    ended = engine.run(
        ["nsight-command", "--nsys=real", "--out=/results/nsight"], user=f"{OTHER}:{OTHER}", **_mounted(results)
    )
    assert (results / "nsight" / "nsight_command.json").exists(), ended.output
    assert ended.status == 0, ended.output


def test_the_host_command_runs_forwards_ctrl_c_and_removes_its_container(engine: Engine, tmp_path: Path) -> None:
    flags = "--device=emulated --profiles=inline,split --blocks=64 --prep-ms=20"
    command = [
        sys.executable, "-m", "repro", "host", "reproduce", f"--image={engine.image}", "--gpus=none", f"--args={flags}",
        f"--results={tmp_path / 'results'}",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "CI"}  # with it progress is not shown
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stderr
        said = []
        watchdog = threading.Timer(LIMIT_S, process.kill)
        watchdog.start()
        for line in process.stderr:
            said.append(line)
            if "inline" in line:
                process.send_signal(signal.SIGINT)
                break
        said += process.stderr.readlines()
        assert process.wait(timeout=LIMIT_S) == 130, "".join(said)
        watchdog.cancel()
    finally:
        if process.poll() is None:
            process.kill()
    assert any("Interrupted. Finished profiles are kept" in line for line in said), "".join(said)
    run = _only_run(tmp_path / "results")
    assert run.root.stat().st_uid == os.getuid()
    assert not engine.client.containers.list(all=True, filters={"label": f"{OWNER_LABEL}={process.pid}"})
