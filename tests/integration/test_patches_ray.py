"""The series on the installed Ray: applied, imported, run and reverted, always on a copy."""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro import ray_patches
from repro.ray_patches import series

PYTHONPATH_OF_TESTS = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))


def run(overlay: Path, code: str, *, path: str | None = None, limit_s: float = 120) -> str:
    """Standard output of ``code`` run with the overlay's Ray in front; the test fails with its stderr otherwise."""
    env = {**os.environ, "PYTHONPATH": f"{overlay}{os.pathsep}{PYTHONPATH_OF_TESTS}", "RAY_DEDUP_LOGS": "0"}
    if path is not None:
        env["PATH"] = path
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ray_patches.overlay(tmp_path_factory.mktemp("stock") / "overlay", [])


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [patch.name for patch in ray_patches.load_series()]
    return ray_patches.overlay(tmp_path_factory.mktemp("fixed") / "overlay", names)


def test_the_series_applies_verifies_and_reverts_byte_for_byte(stock: Path, tmp_path: Path) -> None:
    copy = ray_patches.overlay(tmp_path / "copy", [])
    assert {one.state for one in ray_patches.status(copy).patches} == {"not applied"}
    ray_patches.apply(copy)
    assert {one.state for one in ray_patches.verify(copy).patches} == {"applied"}
    ray_patches.revert(copy)
    assert _differences(stock / "ray", copy / "ray") == []


def test_each_patch_applies_alone_or_names_what_it_needs(stock: Path, tmp_path: Path) -> None:
    patches = ray_patches.load_series()
    touched = [change.path for patch in patches for change in patch.files]
    for patch in patches:
        if all(touched.count(change.path) == 1 for change in patch.files):
            one = ray_patches.overlay(tmp_path / patch.name, [patch.name])
            assert ray_patches.status(one).problems([patch.name]) == []


def test_patch_files_document_themselves() -> None:
    for patch in ray_patches.load_series():
        assert any(tried.startswith(f"{patch.base_version}:") for tried in patch.tried), patch.name
        assert f"`{patch.name}.patch`" in (series.PATCHES_DIR / "README.md").read_text(encoding="utf-8"), patch.name


def test_every_touched_module_imports(fixed: Path) -> None:
    modules = [
        "ray." + change.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for patch in ray_patches.load_series()
        for change in patch.files
    ]
    code = f"import importlib\nfor name in {modules!r}:\n    print(importlib.import_module(name).__file__)"
    for line in run(fixed, code).splitlines():
        assert Path(line).is_relative_to(fixed)


COMMAND = """
import asyncio, logging, os, sys
from ray._private.runtime_env import nsight
from ray._private.runtime_env.context import RuntimeEnvContext
from ray.runtime_env import RuntimeEnv

defaults = dict(nsight.NSIGHT_DEFAULT_CONFIG)
folder = sys.argv[1] if len(sys.argv) > 1 else os.environ["FOLDER"]
plugin = nsight.NsightPlugin(os.path.join(folder, "session", "runtime_resources"))
options = {"t": "nvtx", "o": "out"}

async def valid(config):
    return True, None
plugin._check_nsight_script = valid

for config in ("default", options):
    env = RuntimeEnv(nsight=config)
    for command in (sys.executable, "uv run --with x python -X dev", "", None, "python", os.environ["SPACED"]):
        context = RuntimeEnvContext()
        context.py_executable = command
        asyncio.run(plugin.create(None, env, context, logging.getLogger()))
        plugin.modify_context([], env, context, logging.getLogger())
        prefix, _, rest = context.py_executable.partition("/nsight/")
        print(rest.partition(" ")[2])
assert nsight.NSIGHT_DEFAULT_CONFIG == defaults, nsight.NSIGHT_DEFAULT_CONFIG
assert options == {"t": "nvtx", "o": "out"}, options
"""


def test_the_chosen_command_survives_after_nsys(fixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spaced = tmp_path / "a venv" / "python"
    spaced.parent.mkdir()
    spaced.write_text("#!/bin/sh\n")
    (tmp_path / "session").mkdir()
    monkeypatch.setenv("SPACED", str(spaced))
    monkeypatch.setenv("FOLDER", str(tmp_path))
    lines = run(fixed, COMMAND).splitlines()
    expected = [
        sys.executable,
        "uv run --with x python -X dev",
        sys.executable,
        sys.executable,
        "python",
        f"'{spaced}'",
    ]
    default_options = "--stop-on-exit=true "
    assert lines == [default_options + command for command in expected] + expected


ACTOR = """
import ray, sys

ray.init(address="local", include_dashboard=False, num_cpus=1, object_store_memory=2**28)

@ray.remote(runtime_env={"nsight": {"t": "nvtx", "sample": "none", "cpuctxsw": "none", "o": "'worker_%p'"}})
class Profiled:
    def where(self):
        return ray.__file__, sys.executable

actor = Profiled.remote()
try:
    print(*ray.get(actor.where.remote(), timeout=LIMIT), sep="\\n")
except ray.exceptions.GetTimeoutError:
    print("never started")
finally:
    ray.shutdown()
"""


@pytest.mark.needs("nsys")
def test_a_profiled_actor_starts_without_python_on_path(stock: Path, fixed: Path, tmp_path: Path) -> None:
    path = _path_without_python(tmp_path)
    lines = run(fixed, ACTOR.replace("LIMIT", "120"), path=path, limit_s=200).splitlines()
    assert Path(lines[0]).is_relative_to(fixed)
    assert lines[1] == sys.executable
    assert run(stock, ACTOR.replace("LIMIT", "25"), path=path, limit_s=200).splitlines() == ["never started"]


def _path_without_python(folder: Path) -> str:
    """A PATH with everything of the real one but ``python``: links to the executables, first come first served."""
    folder = folder / "bin"
    folder.mkdir()
    for entry in os.environ["PATH"].split(os.pathsep):
        for file in Path(entry).iterdir() if Path(entry).is_dir() else ():
            link = folder / file.name
            if file.name != "python" and not link.is_symlink():
                link.symlink_to(file)
    return str(folder)


def _differences(one: Path, other: Path) -> list[str]:
    """Files that differ or are on one side only, byte-code aside."""
    names = [
        {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file() and file.suffix != ".pyc"}
        for root in (one, other)
    ]
    _, mismatch, errors = filecmp.cmpfiles(one, other, names[0] & names[1], shallow=False)
    return sorted(names[0] ^ names[1]) + mismatch + errors
