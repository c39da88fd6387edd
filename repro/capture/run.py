"""Capture a run: spec in, profiles and ``run.json`` out.

One Ray cluster serves all captures of the run. Repeats are interleaved (every profile once, then every profile again),
so that a slow minute of the machine meets all of them. ``run.json`` is written after every capture; a run that stopped
half way continues with what is missing.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any

import psutil

from repro import ray_patches
from repro.capture import machine, nsys, torch_profiler
from repro.capture.messages import Ran, StageNode
from repro.capture.payload import Costs, choose_payload, full_payload
from repro.capture.session import OBJECT_STORE_BYTES, Session
from repro.device import cuda
from repro.device.emulated_log import read_log
from repro.device.model import DeviceModel, load_model, model_path
from repro.errors import KitError, MachineError, NoGpuActivityError, NotReproducedError, UsageError
from repro.nsysdb.reader import read_profile
from repro.nsysdb.writer import write_profile
from repro.procs import terminate_as_interrupt
from repro.progress import Progress
from repro.results import RUN_SCHEMA, CaptureRecord, ChecksumRecord, DeviceRecord, RunDir, RunRecord, sha256_of
from repro.spec import PROFILES, ProfileSpec, Regime, RunSpec
from repro.workload import staging
from repro.workload.calibrate import GpuFacts, GpuRequest
from repro.workload.plan import DevicePlan, WorkloadPlan
from repro.workload.prep import PrepPlan

WARMUP_BLOCKS: dict[Regime, int] = {"single-operator": 24, "producer-bound": 16, "compute-bound": 32}
"""Batches through the whole pipeline before the window opens: workers import and touch memory there, and producers
get ahead of the GPU stage where they can. With eight, prep and stage competed for two cores all through the
window, and one of six pairs of split and pinned came out the other way; with 24, none of 24. A paced source keeps its
time after about 13 batches: Ray Data starts with two of its tasks at a time."""

PRODUCER_BOUND_INTERVAL_MS = 104.0
"""Time between two batches of the final pair's source: final_split's published window is 32 x 39 ms / 0.376, so one
batch came every 103.7 ms. The source waits, it does not compute: that leaves the cores to the GPU stage."""


def capture_run(
    spec: RunSpec, run: RunDir, *, fresh: bool, progress: Progress, address: str | None = None
) -> RunRecord:
    """Capture what ``run`` lacks of ``spec``; returns its record, which is on disk as well.

    ``address`` is that of a Ray cluster to join; without it the run starts one. ``fresh`` drops what is there first.
    ``UsageError`` if the folder holds a run of another spec, device or Ray;
    ``NotReproducedError`` if a pipeline's results are wrong (the record says which, no profile is kept);
    ``MachineError`` and ``WaitTimeoutError`` if Ray does not start or stalls. Logs of a failure are in ``run.logs``.
    """
    if spec.device == "cuda" and spec.matmuls > cuda.MAX_MATMULS:
        raise UsageError(f"--matmuls={spec.matmuls}: a CUDA run checks its results for up to {cuda.MAX_MATMULS}.")
    model = load_model(spec.device_model)
    if fresh:
        _clear(run)
    record = _open_record(spec, run, model, _patches(spec))
    tool = nsys.ready_nsys(stock_ray=spec.stock_ray) if spec.profiler == "nsys" else None
    _forget_missing(record, run)
    missing = _missing(spec, record)
    run.write(record)
    if missing:
        cpus = max(2, int(record.machine["cores"]))
        options: dict[str, Any] = {"device": spec.device, "stock_ray": spec.stock_ray, "address": address}
        if spec.device == "cuda":
            options["object_store_bytes"] = record.machine["object_store_bytes"] = _store_bytes()
        with terminate_as_interrupt(), Session(cpus=cpus, **options) as session:
            try:
                _Capturing(spec, run, record, model, session, progress, tool, joined=bool(address)).capture(missing)
            except Exception:
                try:
                    session.keep_logs(run.logs)
                except OSError as error:  # the disk is full, say; what failed first is what is to be raised
                    progress.say(f"The logs of Ray could not be kept in {run.logs}: {error}")
                raise
    return record


class _Capturing:
    """The captures of one cluster."""

    def __init__(
        self,
        spec: RunSpec,
        run: RunDir,
        record: RunRecord,
        model: DeviceModel,
        session: Session,
        progress: Progress,
        tool: nsys.Nsys | None,
        *,
        joined: bool,
    ) -> None:
        self._joined = joined
        self._tool = tool
        self._gpu: GpuFacts | None = None
        self._spec = spec
        self._run = run
        self._record = record
        self._model = model
        self._session = session
        self._progress = progress

    def capture(self, missing: list[tuple[ProfileSpec, int]]) -> None:
        with self._progress.waiting("Starting Ray"):
            started = self._session.start()
        node = started.stage_node or StageNode(node_id=started.node, address="", gpus=0)
        with self._progress.waiting("Measuring the object store" + (" and the GPU" if self._on_cuda else "")):
            measured = self._session.measure(self._gpu_request() if self._on_cuda else None)
        if measured.gpu:
            self._gpu = self._same_gpu(measured.gpu)
        if self._on_cuda:
            self._record.payload = full_payload(self._spec, "a GPU gets whole batches")
        if self._record.payload is None:
            costs = Costs(int(self._record.machine["cores"]), measured.store_ms_per_mib)
            self._record.payload = choose_payload(self._spec, self._model, costs)
        self._run.write(self._record)
        prep = PrepPlan(self._record.payload.travelled_rows, self._spec.cols, self._spec.prep_ms)
        for done, (profile, repeat) in enumerate(missing, 1):
            name = self._run.stem(profile.name, repeat)
            with self._progress.waiting(f"[{done}/{len(missing)}] {name}: {profile.stage}"):
                self._replace(self._capture_one(profile, repeat, prep, node))

    @property
    def _on_cuda(self) -> bool:
        return self._spec.device == "cuda"

    def _gpu_request(self) -> GpuRequest:
        """Matmuls as long as the model's: nine of the published batch take 39 ms."""
        matmul_ms = self._model.matmul_ns(self._spec.rows, self._spec.cols) / 1e6
        return GpuRequest(rows=self._spec.rows, cols=self._spec.cols, matmul_ms=matmul_ms)

    def _same_gpu(self, found: GpuFacts) -> GpuFacts:
        """``found``, recorded; in a run that is continued, what it recorded, so that its matmuls stay the same."""
        if not self._record.device.name:
            self._record.device = DeviceRecord(kind="cuda", name=found.name, driver=found.driver)
            self._record.machine["gpu"] = found.model_dump(mode="json")
            return found
        if found.name != self._record.device.name:
            raise UsageError(
                f"{self._run.root} holds a run on {self._record.device.name}, and this GPU is {found.name}.",
                remedy="Name another folder with --out, or drop what is there with --fresh.",
            )
        return GpuFacts.model_validate(self._record.machine["gpu"])

    def _capture_one(self, profile: ProfileSpec, repeat: int, prep: PrepPlan, node: StageNode) -> CaptureRecord:
        if reason := _skip_reason(profile, self._record):
            return CaptureRecord(profile=profile.name, repeat=repeat, skipped=reason)
        assert self._record.payload
        log = self._session.folder / f"{profile.name}-{repeat}.jsonl"
        if self._joined:  # on the stage's node, among the files of other runs
            log = Path(f"{profile.name}-{repeat}-{secrets.token_hex(4)}.jsonl")
        plan = workload_plan(self._spec, profile, prep, log, inner=self._gpu.inner if self._gpu else 0)
        capture = CaptureRecord(profile=profile.name, repeat=repeat, started_utc=machine.utc_now(), node=node.node_id)
        try:
            return self._captured(capture, plan, node)
        except KitError as error:
            self._replace(capture.model_copy(update={"error": error.message}))
            raise

    def _captured(self, capture: CaptureRecord, plan: WorkloadPlan, node: StageNode) -> CaptureRecord:
        """Run the pipeline and keep its profile; ``capture`` with what there is to say of both."""
        ran = self._session.run(plan)
        capture.checksum = ChecksumRecord(expected=ran.expected, got=ran.got, ok=ran.wrong is None)
        if ran.wrong:
            raise NotReproducedError(f"{capture.profile}: {ran.wrong}")
        path = self._run.profile_path(capture.profile, capture.repeat)
        kept = self._keep(plan, ran, path)
        capture.nsys_rep = str(kept.relative_to(self._run.root)) if kept else None
        wait_ms, producer_bound = ran.wait_ms, ran.producer_bound
        if plan.mode == "staged":
            capture.staging = staging.read_stats(plan, (ran.opened_ns, ran.closed_ns), self._session.folder)
            kernels = read_profile(path).kernels
            if len(kernels):
                wait_ms, producer_bound = staging.kernel_wait(
                    kernels.start.tolist(), kernels.end.tolist(), self._spec.blocks
                )
        return capture.model_copy(
            update={
                "file": str(path.relative_to(self._run.root)),
                "sha256": sha256_of(path),
                "prep_ms": ran.prep_ms,
                "wall_s": ran.wall_s,
                "warmup_batches": plan.warmup_blocks,
                "warmup_s": ran.warmup_s,
                "batches": self._spec.blocks,
                "batch_wait_ms": wait_ms,
                "producer_bound": producer_bound,
                "source_interval_ms": plan.interval_ms,
                "extra": {
                    "stage_call_ms": ran.call_ms,
                    "window_opening_ms": ran.opening_ms,
                    "node_address": node.address,
                    "node_gpus": node.gpus,
                    "reports_expected": 0 if plan.profiler == "emulated" else 1,
                    "reports_found": [Path(file).name for file in ran.files],
                },
            }
        )

    def _keep(self, plan: WorkloadPlan, ran: Ran, path: Path) -> Path | None:
        """Write the profile to ``path``; returns the report of nsys beside it, if there is one."""
        reports = [Path(file) for file in ran.files if ".jsonl" not in Path(file).suffixes]
        if self._tool:
            kept, exported = nsys.keep_report(self._tool, reports, path, plan.stem)
            if len(exported.devices) > 1:
                counts = ", ".join(f"{device} ({count})" for device, count in sorted(exported.devices.items()))
                raise MachineError(f"{plan.stem} has kernels on several devices: {counts}.")
            if self._on_cuda and not exported.devices:
                said = "; ".join(read_profile(path).diagnostics) or "nothing about it"
                raise NoGpuActivityError(
                    f"nsys recorded no kernels of {plan.stem}. It said: {said}.", remedy=nsys.NO_KERNELS_REMEDY
                )
            return kept
        if plan.profiler == "torch":
            if len(reports) != 1:
                raise MachineError(f"torch's profiler left {len(reports)} traces of {plan.stem}; there is one stage.")
            write_profile(path, torch_profiler.read_trace(reports[0]))
        else:
            log = self._session.folder / plan.device.log
            write_profile(path, read_log([log], window_ns=(ran.opened_ns, ran.closed_ns + 1)))
        return None

    def _replace(self, capture: CaptureRecord) -> None:
        _drop(self._record, capture.profile, capture.repeat)
        self._record.captures.append(capture)
        order = list(self._spec.profiles)
        self._record.captures.sort(key=lambda one: (one.repeat, order.index(one.profile)))
        self._run.write(self._record)


def workload_plan(spec: RunSpec, profile: ProfileSpec, prep: PrepPlan, log: Path, *, inner: int = 0) -> WorkloadPlan:
    """The pipeline of one profile, with its device log at ``log``, which is named as a profiler's files will be."""
    model = spec.device_model
    return WorkloadPlan(
        mode=profile.mode,
        regime=profile.regime,
        blocks=spec.blocks,
        warmup_blocks=WARMUP_BLOCKS[profile.regime],
        matmuls=spec.matmuls,
        nominal_bytes=spec.batch_bytes,
        prep=prep,
        interval_ms=PRODUCER_BOUND_INTERVAL_MS if profile.regime == "producer-bound" else 0.0,
        device=DevicePlan(kind=spec.device, model=str(model_path(model).resolve()), log=str(log), inner=inner),
        profiler=spec.profiler,
        stem=log.stem,
    )


def _store_bytes() -> int:
    """Room for the whole batches of all prep tasks where there is: half of what is free in /dev/shm, at most 8 GiB."""
    return max(OBJECT_STORE_BYTES, min(8 << 30, psutil.disk_usage("/dev/shm").free // 2))


def _skip_reason(profile: ProfileSpec, record: RunRecord) -> str | None:
    applied = {patch["name"] for patch in record.patches if patch["state"] == "applied"}
    if profile.needs_patch is None or profile.needs_patch in applied:
        return None
    return f"needs the {profile.needs_patch} patch of Ray, and this run is on a stock Ray (--stock-ray)"


def _patches(spec: RunSpec) -> list[dict[str, Any]]:
    """The series with the state this run has it in; puts it on this environment's Ray unless a stock one is wanted."""
    if spec.stock_ray:
        return [patch | {"state": "not applied"} for patch in ray_patches.digests()]
    ray_patches.apply()
    return ray_patches.digests()


def _open_record(spec: RunSpec, run: RunDir, model: DeviceModel, patches: list[dict[str, Any]]) -> RunRecord:
    """The record in ``run`` if it is one of this spec, a new one if there is none."""
    file = model_path(spec.device_model)
    # Which GPU it is shows when Ray runs on its node.
    device = DeviceRecord(kind="cuda", name="")
    if spec.device == "emulated":
        device = DeviceRecord(
            kind=spec.device, name=f"Emulated {model.name}", model_file=file.name, model_sha256=sha256_of(file)
        )
    if not run.run_json.exists():
        return RunRecord(
            schema=RUN_SCHEMA,
            run=run.root.name,
            **machine.provenance(),
            spec=spec,
            device=device,
            patches=patches,
        )
    record = run.read()
    differing = [name for name in RunSpec.model_fields if getattr(record.spec, name) != getattr(spec, name)]
    if spec.device == "emulated" and record.device != device:
        differing.append("device")
    if record.versions.get("ray") != machine.versions().get("ray"):
        differing.append("version of Ray")
    if record.patches != patches:
        differing.append("state of Ray's patches")
    if differing:
        raise UsageError(
            f"{run.root} holds a run with another {', another '.join(differing)}.",
            remedy="Name another folder with --out, or drop what is there with --fresh.",
        )
    return record


def _forget_missing(record: RunRecord, run: RunDir) -> None:
    """Drop captures whose file is gone or is not the one recorded, those that failed, and those that were skipped."""
    for capture in list(record.captures):
        file = run.root / capture.file if capture.file else None
        if file is None or not file.is_file() or sha256_of(file) != capture.sha256:
            _drop(record, capture.profile, capture.repeat)


def _missing(spec: RunSpec, record: RunRecord) -> list[tuple[ProfileSpec, int]]:
    have = {(capture.profile, capture.repeat) for capture in record.captures}
    return [
        (PROFILES[name], repeat)
        for repeat in range(1, spec.repeats + 1)
        for name in spec.profiles
        if (name, repeat) not in have
    ]


def _drop(record: RunRecord, profile: str, repeat: int) -> None:
    record.captures = [one for one in record.captures if (one.profile, one.repeat) != (profile, repeat)]


def _clear(run: RunDir) -> None:
    """Remove what captures and their analyses left in ``run``, and nothing else."""
    for folder in (run.profiles, run.analysis, run.figures, run.logs):
        if folder.exists():
            shutil.rmtree(folder)
    for file in (run.run_json, run.report):
        file.unlink(missing_ok=True)
