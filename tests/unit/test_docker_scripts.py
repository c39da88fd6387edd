"""The Dockerfile and its scripts, as far as they can be tested without NVIDIA's, Ray's and Bazel's servers.

Names and versions are parsed and compared; the scripts run with stand-ins for the commands that reach the network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from repro.ray_patches.series import load_series

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMMIT = load_series()[0].base_commit


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def _arguments() -> dict[str, str]:
    return dict(rest.split("=", 1) for word, rest in _instructions() if word == "ARG" and "=" in rest)


class StandIns:
    """Commands on a PATH of their own that log how they were called.

    The log holds every argument with a NUL behind it and every call with ``_END`` behind it: what bash can print in one
    write, for commands of one pipe run at once.
    """

    _END = "\x1e\0"

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self._log = folder / "calls"
        self._log.touch()
        self._real = os.environ["PATH"]

    def add(self, name: str, body: str = "", folder: Path | None = None) -> None:
        file = (folder or self.bin) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        log = rf"""printf '%s\0' {name} "$@" $'\x1e' >>'{self._log}'"""
        file.write_text(f"#!/bin/bash\nPATH='{self._real}'\n{log}\n{body}\n")
        file.chmod(0o755)

    @property
    def calls(self) -> list[list[str]]:
        return [call.split("\0")[:-1] for call in self._log.read_text().split(self._END)[:-1]]

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if name != "DOCKER"}
        variables = {**inherited, "PATH": f"{self.bin}:{self._real}", **environment}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)


@pytest.fixture
def stand_ins(tmp_path: Path) -> StandIns:
    return StandIns(tmp_path)


def test_the_defaults_name_what_was_published() -> None:
    arguments = _arguments()
    assert re.fullmatch(r"nvidia/cuda:13\.0\.\d+-base-ubuntu24\.04", arguments["BASE_IMAGE"])
    assert arguments["NSIGHT_SOURCE"] == "nvidia"
    assert arguments["NSIGHT_VERSION"] == "2026.1.3"
    assert arguments["RAY_BUILD"] == "wheel"
    assert arguments["TORCH_SPEC"] == "torch==2.14.0"
    assert f"version=${{NSIGHT_VERSION:-{arguments['NSIGHT_VERSION']}}}" in (ROOT / "docker/install-nsight").read_text()
    assert f'"ray[data]=={arguments["RAY_VERSION"]}"' in (ROOT / "pyproject.toml").read_text()
    assert {patch.base_version for patch in load_series()} == {arguments["RAY_VERSION"]}


def test_the_arguments_come_first_and_every_stage_is_there() -> None:
    words = [word for word, _ in _instructions()]
    first = words.index("FROM")
    assert set(words[:first]) == {"ARG"}
    stages = [rest.split(" AS ")[1] for word, rest in _instructions() if word == "FROM"]
    assert {"ray-wheel", "ray-source"} < set(stages)
    for word, rest in _instructions():
        if word == "COPY" and (source := re.match(r"--from=(\S+)", rest)):
            assert source[1] in stages
    assert stages[-1] == "kit"


def test_the_image_starts_the_command_line_under_an_init() -> None:
    last = dict(_instructions())
    assert json.loads(last["ENTRYPOINT"]) == ["/usr/bin/tini", "--", "python", "-m", "repro"]
    assert json.loads(last["CMD"]) == ["--help"]
    assert last["USER"] == "10001"
    assert last["VOLUME"] == "/results"


def test_what_is_copied_is_there_and_in_the_build_context() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for word, rest in _instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert any(source == name or source.startswith(f"{name}/") for name in kept), source


def test_the_kit_is_copied_last_and_after_what_takes_minutes() -> None:
    copies = [rest.split()[-2] for word, rest in _instructions() if word == "COPY"]
    assert copies[-1] == "repro"
    last_stage = DOCKERFILE.rsplit("\nFROM ", 1)[1]
    assert "pip install" not in last_stage and "apt-get" not in last_stage


@pytest.fixture
def nsight(stand_ins: StandIns, tmp_path: Path) -> Path:
    """``install-nsight`` with the folders of the system moved to ``tmp_path``."""
    text = (ROOT / "docker/install-nsight").read_text()
    for folder in ("/usr/share/keyrings", "/etc/apt", "/opt/nvidia"):
        assert folder in text
        text = text.replace(folder, f"{tmp_path}{folder}")
        (tmp_path / folder[1:]).mkdir(parents=True)
    (tmp_path / "etc/apt/sources.list.d").mkdir()
    script = tmp_path / "install-nsight"
    script.write_text(text)
    script.chmod(0o755)
    stand_ins.add("id", "echo 0")
    stand_ins.add("uname", "echo x86_64")
    stand_ins.add("curl", "echo KEY")
    stand_ins.add("gpg", 'cat >"${@: -1}"')
    installed = tmp_path / "opt/nvidia/nsight-systems-cli/2026.1.3/target-linux-x64"
    made = (
        f"mkdir -p {installed}; printf '#!/bin/sh\\necho NVIDIA Nsight Systems version 2026.1.3.1\\n' >{installed}/nsys"
    )
    stand_ins.add("apt-get", f'case "$*" in *nsight-systems-cli*) {made}; chmod 755 {installed}/nsys;; esac')
    return script


def test_nsight_from_nvidia(nsight: Path, stand_ins: StandIns, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    done = stand_ins.run(str(nsight), NSIGHT_BIN=str(target))
    assert done.returncode == 0, done.stderr
    assert (target / "nsys").resolve().parts[-2:] == ("target-linux-x64", "nsys")
    repository = "https://developer.download.nvidia.com/devtools/repos/ubuntu2404/amd64"
    assert ["curl", "-fsSL", "--retry", "3", f"{repository}/nvidia.pub"] in stand_ins.calls
    keyring = tmp_path / "usr/share/keyrings/nvidia-devtools.gpg"
    assert keyring.read_text() == "KEY\n"
    source = (tmp_path / "etc/apt/sources.list.d/nvidia-devtools.list").read_text()
    assert source == f"deb [signed-by={keyring}] {repository}/ /\n"
    assert stand_ins.calls[-1][-1] == "nsight-systems-cli-2026.1.3"
    calls = len(stand_ins.calls)
    again = stand_ins.run(str(nsight), "nvidia", NSIGHT_BIN=str(target))
    assert "already there" in again.stdout
    assert len(stand_ins.calls) == calls


def test_nsight_refuses_what_it_cannot_do(nsight: Path, stand_ins: StandIns, tmp_path: Path) -> None:
    assert "source must be nvidia or debian" in stand_ins.run(str(nsight), "fedora").stderr
    stand_ins.add("uname", "echo aarch64")
    done = stand_ins.run(str(nsight), NSIGHT_BIN=str(tmp_path))
    assert (done.returncode, "only x86-64" in done.stderr) == (3, True)
    stand_ins.add("id", "echo 1000")
    assert "must run as root" in stand_ins.run(str(nsight), NSIGHT_BIN=str(tmp_path)).stderr


_BUILDING_PIP = """\
[ "$1" = wheel ] || exit 0
while [ "$1" != --wheel-dir ]; do shift; done
mkdir -p "$2"
touch "$2/ray-2.58.0-cp312.whl"
"""


@pytest.fixture
def ray_build(stand_ins: StandIns, tmp_path: Path) -> dict[str, str]:
    """Stand-ins for everything that ``build-ray`` calls; git makes a checkout, pip a wheel."""
    checkout = tmp_path / "checkout"
    installer = f"mkdir -p {checkout}/ci/env; echo 'mkdir -p $HOME/bin; cp {stand_ins.bin}/bazel $HOME/bin/' "
    version, unset = checkout / "python/ray/_version.py", 'commit = "{{RAY_COMMIT_SHA}}"'
    head = f"[ -e {checkout}/ci ] && echo {COMMIT}"
    body = f"""case "$*" in
        init*) mkdir -p {checkout}/.git;;
        *rev-parse*) {head};;
        *checkout*)
            {installer} >{checkout}/ci/env/install-bazel.sh
            mkdir -p {version.parent}
            echo '{unset}' >{version};;
    esac"""
    stand_ins.add("git", body)
    stand_ins.add("bazel")
    venv = tmp_path / "venv"
    stand_ins.add("python", folder=venv / "bin")
    stand_ins.add("pip", folder=venv / "bin")
    stand_ins.add("pip", _BUILDING_PIP, folder=tmp_path / "builder")
    stand_ins.add("python3", f'mkdir -p "$3/bin"; cp {tmp_path}/builder/pip "$3/bin/pip"')
    return {"RAY_SOURCE": str(checkout), "HOME": str(tmp_path / "home"), "VENV": str(venv)}


def test_ray_from_source(stand_ins: StandIns, ray_build: dict[str, str]) -> None:
    venv = ray_build.pop("VENV")
    done = stand_ins.run(str(ROOT / "docker/build-ray"), "2.58.0", str(ROOT), venv, **ray_build)
    assert done.returncode == 0, done.stderr
    checkout = ray_build["RAY_SOURCE"]
    fetched = ["git", "-C", checkout, "fetch", "-q", "--depth", "1", "https://github.com/ray-project/ray.git", COMMIT]
    assert fetched in stand_ins.calls
    steps = [call for call in stand_ins.calls if call[0] in ("python", "pip")]
    assert steps[0] == ["python", "-m", "repro.ray_patches.flush_source", "apply", checkout]
    assert "import apply" in steps[1][2] and steps[1][3] == f"{checkout}/python/ray"
    assert steps[2][:2] == ["pip", "install"] and "cython==3.0.12" in steps[2]
    assert steps[3][:2] == ["pip", "wheel"] and steps[3][-1] == f"{checkout}/python"
    assert steps[4][:2] == ["pip", "install"] and steps[4][-1].endswith("/ray-2.58.0-cp312.whl")
    assert "import verify" in steps[5][2]
    assert (Path(checkout) / "python/ray/_version.py").read_text() == f'commit = "{COMMIT}"\n'
    calls = len(stand_ins.calls)
    assert stand_ins.run(str(ROOT / "docker/build-ray"), "2.58.0", str(ROOT), venv, **ray_build).returncode == 0
    assert not [call for call in stand_ins.calls[calls:] if "fetch" in call]  # the checkout is used again


def test_what_the_source_stage_copies_is_enough_to_patch(tmp_path: Path) -> None:
    stage = DOCKERFILE.split("AS ray-source", 1)[1].split("\nFROM ", 1)[0]
    for sources, target in re.findall(r"^COPY (.+) (/src/repro\S*)$", stage, flags=re.MULTILINE):
        folder = tmp_path / target[1:]
        for source in sources.split():
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, folder)
    shutil.copytree(ROOT / "patches", tmp_path / "src/patches")
    code = "from repro.ray_patches import apply, flush_source, series, verify; print(len(series.load_series()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(len(load_series())), done.stderr


def test_ray_from_source_leaves_somebodys_own_checkout_alone(
    stand_ins: StandIns, ray_build: dict[str, str], tmp_path: Path
) -> None:
    work = tmp_path / "checkout/work.py"
    work.parent.mkdir()
    work.touch()
    done = stand_ins.run(str(ROOT / "docker/build-ray"), "2.58.0", str(ROOT), ray_build.pop("VENV"), **ray_build)
    assert (done.returncode, stand_ins.calls) == (3, [])
    assert "RAY_SOURCE=DIR" in done.stderr and work.exists()


def test_ray_from_source_refuses_another_version(stand_ins: StandIns, ray_build: dict[str, str]) -> None:
    venv = ray_build.pop("VENV")
    done = stand_ins.run(str(ROOT / "docker/build-ray"), "2.60.0", str(ROOT), venv, **ray_build)
    assert (done.returncode, stand_ins.calls) == (3, [])
    assert "do not name one commit for ray 2.60.0" in done.stderr


def test_a_base_from_debootstrap(stand_ins: StandIns, tmp_path: Path) -> None:
    stand_ins.add("docker", 'case "$1" in image) exit 1;; import) cat >/dev/null;; esac')
    stand_ins.add("debootstrap", 'mkdir -p "${@: -2:1}/var/cache/apt/archives" "${@: -2:1}/var/lib/apt/lists"')
    stand_ins.add(
        "apt-get", "echo Other http://x; echo Debian http://mirror/debian-security; echo Debian http://mirror"
    )
    done = stand_ins.run(str(ROOT / "docker/ci-base"), "base:x", "bookworm")
    assert done.returncode == 0, done.stderr
    bootstrap = next(call for call in stand_ins.calls if call[0] == "debootstrap")
    assert bootstrap[3] == "bookworm" and bootstrap[-1] == "http://mirror"
    assert stand_ins.calls[-1] == ["docker", "import", "--change", 'CMD ["bash"]', "-", "base:x"]
    stand_ins.add("docker")
    assert "already there" in stand_ins.run(str(ROOT / "docker/ci-base"), "base:x").stdout
