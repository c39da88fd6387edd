"""Where the GPU stage goes, in clusters made up; and what is said where its worker never came."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from repro.capture import placement
from repro.capture.placement import choose_stage_node
from repro.errors import MachineError


def cluster(monkeypatch: pytest.MonkeyPatch, *nodes: tuple[str, str, float, bool]) -> None:
    """Nodes as (id, address, GPUs, alive); the driver is on the one called "own"."""
    ray: Any = SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "own"),
        nodes=lambda: [
            {"NodeID": name, "NodeManagerAddress": address, "Alive": alive, "Resources": {"CPU": 2.0, "GPU": gpus}}
            for name, address, gpus, alive in nodes
        ],
    )
    monkeypatch.setitem(sys.modules, "ray", ray)


OWN = ("own", "10.0.0.9", 0.0, True)


@pytest.mark.parametrize(
    ("nodes", "emulated", "cuda"),
    [
        ([OWN], "own", None),
        ([("b", "10.0.0.2", 8.0, True), OWN, ("a", "10.0.0.3", 1.0, True)], "b", "b"),
        ([("b", "10.0.0.2", 8.0, True), ("own", "10.0.0.9", 1.0, True)], "own", "own"),
        ([("b", "10.0.0.2", 8.0, False), OWN], "own", None),
        ([("b", "10.0.0.2", 0.5, True), OWN], "own", None),
    ],
    ids=["one without", "others have", "own has", "dead", "a share of one"],
)
def test_the_stages_node(
    nodes: list[tuple[str, str, float, bool]], emulated: str, cuda: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, *nodes)
    assert choose_stage_node("emulated").node_id == emulated
    if cuda:
        assert choose_stage_node("cuda").node_id == cuda
    else:
        with pytest.raises(MachineError, match="nodes of the Ray cluster has a GPU"):
            choose_stage_node("cuda")


def test_why_no_worker_came_is_told_from_rays_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "report_folder", lambda: tmp_path / "nsight")
    waited = RuntimeError("Timed out while starting actors.\nThis may mean anything.")
    assert "Ray's logs end with: nothing" in placement.no_worker_error(waited).message
    (tmp_path / "runtime_env_agent.log").write_text("Created runtime env\n")
    assert placement.no_worker_error(waited).message.endswith("Created runtime env")
    (tmp_path / "raylet.err").write_text("bash: line 1: python: command not found\n\n")
    error = placement.no_worker_error(waited)
    assert error.message.endswith("Ray's logs end with: bash: line 1: python: command not found")
    assert "Timed out while starting actors. This may mean anything." in error.message
    assert "ray#66093" in error.remedy
