"""Which patches of Ray a run has: applied by the run, left alone for a stock one, never mixed in one folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro import ray_patches
from repro.capture import run as capture
from repro.device.model import load_model
from repro.errors import UsageError
from repro.results import RunDir
from repro.spec import PROFILES, RunSpec

APPLIED = [{"name": "pinned-staging", "sha256": "ab", "state": "applied"}]


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(ray_patches, "apply", lambda: calls.append("apply"))
    monkeypatch.setattr(ray_patches, "digests", lambda: [dict(patch) for patch in APPLIED])
    return calls


def spec(**changes: object) -> RunSpec:
    return RunSpec(**{"profiles": ("final_split", "final_staged"), "device": "emulated", **changes})


def test_a_run_applies_the_series_and_records_it(applied: list[str]) -> None:
    assert capture._patches(spec()) == APPLIED
    assert applied == ["apply"]


def test_a_stock_run_leaves_this_environment_alone(applied: list[str]) -> None:
    (patch,) = capture._patches(spec(stock_ray=True))
    assert patch["state"] == "not applied"
    assert applied == []


def test_the_staged_profile_is_skipped_with_the_reason_on_stock_ray(tmp_path: Path, applied: list[str]) -> None:
    for stock in (False, True):
        run_spec = spec(stock_ray=stock)
        record = capture._open_record(run_spec, RunDir(tmp_path), load_model("b200"), capture._patches(run_spec))
        assert capture._skip_reason(PROFILES["final_split"], record) is None
        reason = capture._skip_reason(PROFILES["final_staged"], record)
        assert (reason is not None) == stock
    assert reason is not None and "pinned-staging" in reason and "--stock-ray" in reason


def test_a_folder_never_mixes_patch_states(tmp_path: Path, applied: list[str]) -> None:
    run = RunDir(tmp_path)
    run.write(capture._open_record(spec(), run, load_model("b200"), APPLIED))
    with pytest.raises(UsageError, match="state of Ray's patches"):
        capture._open_record(spec(), run, load_model("b200"), [APPLIED[0] | {"state": "not applied"}])
