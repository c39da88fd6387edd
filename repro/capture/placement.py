"""Where the GPU stage runs and under what. Runs in the driver of a connected Ray."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, Literal

import repro
from repro.capture.messages import StageNode
from repro.capture.nsys import nsight_options
from repro.device.node_folder import report_folder
from repro.errors import MachineError, WaitTimeoutError
from repro.text import one_line
from repro.workload.calibrate import GpuFacts, GpuRequest, calibrate
from repro.workload.plan import WorkloadPlan

CALIBRATION_LIMIT_S: Final = 120.0


def choose_stage_node(device: Literal["emulated", "cuda"]) -> StageNode:
    """The driver's own node if it has a GPU or no node has one, else the first node that has, by address.

    ``MachineError`` if a GPU is needed and Ray sees none.
    """
    import ray

    own = ray.get_runtime_context().get_node_id()
    nodes = [_stage_node(node) for node in ray.nodes() if node["Alive"]]
    having = [node for node in nodes if node.gpus >= 1]
    if device == "cuda" and not having:
        raise MachineError(
            f"None of the {len(nodes)} nodes of the Ray cluster has a GPU.",
            remedy="Start Ray where the GPU is, with --num-gpus; CUDA_VISIBLE_DEVICES may hide it.",
        )
    return min(
        having or [node for node in nodes if node.node_id == own], key=lambda node: (node.node_id != own, node.address)
    )


def cluster_environment() -> dict[str, Any]:
    """Runtime environment of a job in a cluster that others started: this kit's code, and what its workers need set."""
    return {
        "py_modules": [str(Path(repro.__file__).parent)],
        "env_vars": {
            name: value for name, value in os.environ.items() if name.startswith("MALLOC_") or name == "OMP_NUM_THREADS"
        },
    }


def stage_options(plan: WorkloadPlan, node: StageNode) -> dict[str, Any]:
    """Ray options of the GPU stage's actor: its node and, for nsys, the command that it is started under."""
    options: dict[str, Any] = {"scheduling_strategy": _pinned_to(node)}
    if plan.profiler == "nsys":
        options["runtime_env"] = {"nsight": nsight_options(plan.stem)}
    return options


def calibrate_gpu(node: StageNode, request: GpuRequest) -> GpuFacts:
    """Calibrate the GPU in a task on the stage's node. ``WaitTimeoutError`` if that takes too long."""
    import ray

    remote: Any = ray.remote(num_cpus=0, num_gpus=1, scheduling_strategy=_pinned_to(node), max_retries=0)(calibrate)
    try:
        facts: GpuFacts = ray.get(remote.remote(request), timeout=CALIBRATION_LIMIT_S)
    except ray.exceptions.GetTimeoutError:
        raise WaitTimeoutError(f"Waited {CALIBRATION_LIMIT_S:.0f} s for the calibration of the GPU.") from None
    return facts


def no_worker_error(error: Exception) -> MachineError:
    """Why no worker of the GPU stage came up under nsys, from Ray's logs of this node."""
    logs = report_folder().parent
    said = next(filter(None, map(_last_line, (logs / "raylet.err", logs / "runtime_env_agent.log"))), "nothing")
    summary = one_line(str(error).strip())[:300]
    return MachineError(
        f"The GPU stage yielded no batch under nsys: {summary}. Ray's logs end with: {said}",
        remedy="If the worker's command is a bare python (ray#66093): python -m repro patches apply, on the node that "
        "has the GPU and before Ray starts there.",
    )


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((one_line(line.strip())[:300] for line in reversed(lines) if line.strip()), "")


def _stage_node(node: dict[str, Any]) -> StageNode:
    return StageNode(
        node_id=node["NodeID"], address=node["NodeManagerAddress"], gpus=float(node["Resources"].get("GPU", 0))
    )


def _pinned_to(node: StageNode) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node.node_id, soft=False)
