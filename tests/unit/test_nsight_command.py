"""How the nsight-command experiment judges a worker's command, what it takes from Ray's logs, and its page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from golden_files import check_golden

from repro.ray_bugs import nsight_command
from repro.ray_bugs.nsight_command import MARKER, SCHEMA, CaseRecord, Result, verdict

CASE = "no python on PATH"


def _record(arm: str, outcome: str | None, **more: object) -> CaseRecord:
    return CaseRecord(case=CASE, arm=arm, outcome=outcome, chosen="/usr/bin/python3", **more)


def _result(*cases: CaseRecord, kind: str = "real") -> Result:
    return Result(
        schema=SCHEMA,
        created_utc="2026-01-02T03:04:05Z",
        kit_version="0.1.0",
        revision=None,
        versions={"python": "3.11.7", "ray": "2.58.0"},
        machine={"cores": 2, "cpu": "A CPU", "system": "Linux", "kernel": "6.1"},
        nsys_kind=kind,
        nsys_version="NVIDIA Nsight Systems version 2023.4.4" if kind == "real" else "nsys stand-in 1",
        actor_limit_s=45,
        cases=list(cases),
    )


@pytest.mark.parametrize(
    ("stock", "fixed", "expected"),
    [
        ("never started", "started", "reproduced"),
        ("wrong command", "started", "reproduced"),
        ("never started", "never started", "not reproduced"),
        ("never started", "wrong command", "not reproduced"),
        ("started", "started", "inconclusive"),
    ],
)
def test_verdict(stock: str, fixed: str, expected: str) -> None:
    result = _result(_record("stock", stock), _record("fixed", fixed))
    result.verdict, result.reason = verdict(result)
    assert result.verdict == expected
    assert result.exit_status == (0 if expected == "reproduced" else 1)


def test_one_case_that_stock_ray_gets_right_is_not_reproduced() -> None:
    result = _result(_record("stock", "started"), _record("stock", "never started"), _record("fixed", "started"))
    assert verdict(result)[0] == "not reproduced"


def test_a_case_that_could_not_run_is_inconclusive() -> None:
    result = _result(_record("stock", None, error="Ray did not start"), _record("fixed", "started"))
    assert verdict(result) == ("inconclusive", f"{CASE}, stock could not be run: Ray did not start")


@pytest.mark.parametrize(
    ("chosen", "executable", "options", "difference"),
    [
        (("/v/python",), "/v/python", [], None),
        (("/v/python", "-X", MARKER), "/v/python", [MARKER], None),
        (("/v/python", "-X", MARKER), "/v/python", [], f"its arguments -X {MARKER} are gone"),
        (("/v/python",), "/usr/bin/python", [], "runs /usr/bin/python"),
    ],
)
def test_difference(chosen: tuple[str, ...], executable: str, options: list[str], difference: str | None) -> None:
    assert nsight_command._difference({"executable": executable, "options": options}, chosen) == difference


def test_reads_the_command_and_the_reason_from_the_logs(tmp_path: Path) -> None:
    assert nsight_command._worker_command(tmp_path) is None
    (tmp_path / "runtime_env_agent.log").write_text(
        'context: {"py_executable": "nsys profile -o \\"a b\\" python", "java_jars": []}\n'
    )
    assert nsight_command._worker_command(tmp_path) == 'nsys profile -o "a b" python'
    gave_up = {"phase": "gave up", "problem": "no worker after 45 s"}
    assert nsight_command._reason(gave_up, tmp_path) == "no worker after 45 s"
    (tmp_path / "raylet.err").write_text("first\nNot found\x1b[0m\n\n")
    assert nsight_command._reason(gave_up, tmp_path) == "no worker after 45 s; raylet.err: Not found\ufffd[0m"


def test_links_everything_but_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, programs = tmp_path / "1", tmp_path / "2", tmp_path / "programs"
    for path in (first / "nsys", first / "python3.11", second / "nsys", second / "bash", second / "python"):
        path.parent.mkdir(exist_ok=True)
        path.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{first}{os.pathsep}{tmp_path}/none{os.pathsep}{second}")
    nsight_command._link_programs(programs)
    assert {path.name: path.readlink() for path in programs.iterdir()} == {
        "nsys": first / "nsys",
        "bash": second / "bash",
    }


def test_virtual_environment_with_a_space_sees_this_ones_packages(tmp_path: Path) -> None:
    python = nsight_command._environment_with_a_space(tmp_path)
    assert " " in str(python)
    assert python.resolve() == Path(sys.executable).resolve()
    found = subprocess.run([python, "-c", "import psutil, sys; print(sys.executable)"], capture_output=True, text=True)
    assert found.stdout.strip() == str(python), found.stderr


def test_page() -> None:
    result = _result(
        _record(
            "stock",
            "never started",
            command="nsys profile -o `x` python",
            reason="no worker after 45 s; raylet.err: a|b",
        ),
        _record("fixed", "started", command="nsys profile '/a b/python'", start_s=2.34),
        _record("fixed", None, error="the driver ended with status 1"),
    )
    result.verdict, result.reason = verdict(result)
    check_golden("nsight_command.md", nsight_command.markdown(result))


def test_page_says_stand_in() -> None:
    assert "**STAND-IN.**" in nsight_command.markdown(_result(kind="stand-in"))
    assert "STAND-IN" not in nsight_command.markdown(_result())
