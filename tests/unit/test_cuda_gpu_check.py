"""``scripts/gpu_check``: its steps, limits and summary, with programs of seconds in place of the kit."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from report_models import analysis, capture_record, run_record

from repro.results import RunDir, write_json
from repro.spec import RunSpec

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("gpu_check", str(SCRIPT))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    loader.exec_module(module)
    return module


def program(script: ModuleType, name: str, text: str, limit_s: float = 30.0) -> object:
    return script.Step(name, [sys.executable, "-c", text], limit_s)


def test_limits_and_statuses_of_steps(script: ModuleType, tmp_path: Path) -> None:
    late = time.monotonic() + 100
    good = script.run(program(script, "good", "print('fine')"), tmp_path, late)
    bad = script.run(program(script, "bad", "import sys; sys.exit('no GPU')"), tmp_path, late)
    slow = script.run(program(script, "slow", "import time; time.sleep(60)", 0.3), tmp_path, late)
    never = script.run(program(script, "never", "print(1)"), tmp_path, time.monotonic() - 1)
    assert [one.status for one in (good, bad, slow, never)] == [0, 1, None, None]
    text = script.summary([good, bad, slow], tmp_path)
    assert "| good | done, status 0, " in text
    assert "| fine |" in text
    assert "| bad | FAILED, status 1, " in text
    assert "| no GPU |" in text
    assert "| slow | out of time after " in text
    assert "| never | out of time after 0 s |" in script.summary([never], tmp_path)


def doctor(out: Path, **verdicts: str) -> None:
    checks = [{"name": name.replace("_", " "), "verdict": v, "found": f"{name}|x"} for name, v in verdicts.items()]
    (out / "doctor.stdout").write_text(json.dumps({"checks": checks}))


@pytest.mark.parametrize(("verdict", "steps"), [("ok", 4), ("broken", 3)])
def test_nsys_takes_part_where_it_knows_the_driver(
    script: ModuleType, tmp_path: Path, verdict: str, steps: int
) -> None:
    doctor(tmp_path, nsys="ok", nsys_for_cuda=verdict)
    planned = list(script.steps("cuda", None, tmp_path))
    assert len(planned) == steps
    assert [step.name for step in planned][:3] == ["doctor", "torch", "tests"]
    assert "--profiler=torch" in planned[1].command
    assert "--blocks=4" not in planned[1].command
    assert sum(step.limit_s for step in planned[:3]) + script.END_S < 500


def test_without_a_doctors_answer_nsys_stays_out(script: ModuleType, tmp_path: Path) -> None:
    assert len(list(script.steps("cuda", None, tmp_path))) == 3


def test_the_summary_has_the_gpu_the_table_and_what_is_missing(script: ModuleType, tmp_path: Path) -> None:
    spec = RunSpec(profiles=("split", "final_staged"), device="cuda", profiler="torch")
    run = RunDir(tmp_path / "torch")
    record = run_record(run="torch", spec=spec)
    record.device.kind, record.device.name, record.device.driver = "cuda", "NVIDIA H200", "580.95.05"
    record.machine["gpu"] = {"inner": 8192, "matmul_ms": 5.0}
    record.captures = [capture_record("split", 1), capture_record("final_staged", 1, error="lost | torn")]
    run.write(record)
    write_json(run.analysis_path("split"), analysis("split", idle_pct=29.0))
    doctor(tmp_path, gpu="ok", copies="ok")
    text = script.summary([], tmp_path)
    assert "**NVIDIA H200**, driver 580.95.05" in text
    assert "recorded by torch's profiler" in text
    assert "inner size 8192 takes 5.00 ms, nine take 45.0 ms" in text
    assert "| split | 29.0% | 29.1% |" in text
    assert r"| final_staged | lost \| torn |" in text
    assert r"- copies: copies\|x" in text
