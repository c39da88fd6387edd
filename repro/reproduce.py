"""``reproduce``: resolve the device, capture, analyse, render. Each step reads what the one before left on disk.

Which folder a run gets: ``--out`` if named; otherwise the newest folder below ``results/`` that holds an unfinished run
of the same specification, made by the same kit, revision and versions, and that no other process works on; otherwise
a new one, named by the time and the device. ``fresh`` never continues. A folder is locked while a process works on it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from repro import __version__
from repro.analysis import analyze
from repro.analysis.model import SCHEMA, Analysis
from repro.capture import capture_run, resolve_device
from repro.capture.machine import revision, versions
from repro.capture.session import OBJECT_STORE_BYTES
from repro.errors import InputError, KitError, UsageError
from repro.preflight import check_folder, check_machine
from repro.progress import Progress
from repro.report import RESULTS, run_folders, write_report
from repro.report.model import ReportModel
from repro.results import CaptureRecord, RunDir, RunRecord, read_json, write_json
from repro.spec import RunSpec

LOCK: Final = ".lock"
_ANALYSIS_FAILED: Final = "analysis: "


@dataclass(frozen=True)
class Outcome:
    """A rendered run, and the first error that left something out of it."""

    model: ReportModel
    error: KitError | None


def reproduce(
    values: Mapping[str, Any],
    *,
    device: Literal["auto", "cuda", "emulated"],
    profiler: Literal["auto", "nsys", "torch"],
    out: Path | None,
    fresh: bool,
    progress: Progress,
    address: str | None = None,
) -> Outcome:
    """Capture what is missing of the run that ``values`` (fields of ``RunSpec``) describe, analyse and render it.

    An error in the middle still leaves a report of what there is; it is in the outcome. Raises ``UsageError`` for
    flags that do not go together and ``MachineError`` if the device cannot be had.
    """
    if out is None:
        check_folder(RESULTS)
    if address:
        # The GPU is elsewhere; whether there is one shows when the cluster is joined.
        check_machine("emulated", out or RESULTS)
        kind: Literal["emulated", "cuda"] = "emulated" if device == "emulated" else "cuda"
        why = f"of the Ray cluster at {address}"
    else:
        check_machine(device, out or RESULTS, profiler=profiler)
        kind, why = resolve_device(device)
    spec = _spec({**values, "device": kind, "profiler": _profiler(kind, profiler)})
    _check_flags(spec)
    if address and spec.stock_ray:
        raise UsageError("--stock-ray is for the cluster that a run starts itself.", remedy="Leave out --address.")
    if kind == "emulated":
        progress.say(f"EMULATED device, model {spec.device_model} ({why}): nothing below is measured on a GPU.")
        if spec.profiler == "nsys":
            progress.say("nsys records the ranges of the pipeline; it sees no CUDA, so no idle time can be computed.")
    else:
        progress.say(f"CUDA device ({why}).")
    with _open_run(spec, out, fresh=fresh) as run_dir, _interrupts_told(run_dir, progress):
        progress.say(f"Run: {run_dir.root}{_continued(run_dir, spec, fresh=fresh)}")
        error: KitError | None = None
        try:
            record = capture_run(spec, run_dir, fresh=fresh, progress=progress, address=address)
        except (UsageError, InputError):
            raise
        except KitError as failed:
            if not run_dir.run_json.exists():
                raise
            error, record = failed, run_dir.read()
            if not any(capture.file for capture in record.captures):
                raise
        run_dir.report.unlink(missing_ok=True)  # one that is there says that the run was finished
        error = error or _analyze_all(run_dir, record, progress)
        with progress.waiting("Rendering the report"):
            return Outcome(write_report(run_dir), error)


def _spec(values: Mapping[str, Any]) -> RunSpec:
    try:
        return RunSpec(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-") if first["loc"] else "the specification"
        reason = first["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
        raise UsageError(f"--{name}={first['input']}: {reason}.") from None


def _profiler(kind: str, asked: Literal["auto", "nsys", "torch"]) -> str:
    if kind == "cuda":
        return "nsys" if asked == "auto" else asked
    if asked == "torch":
        raise UsageError("--profiler=torch records a CUDA device, this run is emulated.", remedy="Leave it out.")
    return "nsys" if asked == "nsys" else "emulated"


def _check_flags(spec: RunSpec) -> None:
    """A flag that this device would ignore is an error, and a batch that Ray cannot carry."""
    if 2 * spec.batch_bytes > OBJECT_STORE_BYTES:  # it and the result of the stage are there at the same time
        raise UsageError(
            f"--rows={spec.rows} --cols={spec.cols}: a batch of {spec.batch_bytes / 2**30:.1f} GiB is more than "
            f"half of Ray's object store ({OBJECT_STORE_BYTES / 2**30:g} GiB).",
            remedy="Make batches smaller and --blocks larger.",
        )
    if isinstance(spec.payload, int) and spec.payload > spec.rows:
        raise UsageError(f"--payload={spec.payload}: a batch has {spec.rows} rows.", remedy="Or say --payload=full.")
    if spec.device == "emulated":
        return
    if isinstance(spec.payload, int):
        raise UsageError(f"--payload={spec.payload} cuts batches on the emulated device only.", remedy="Leave it out.")
    if spec.device_model != RunSpec.model_fields["device_model"].default:
        raise UsageError("--device-model is for the emulated device.", remedy="Leave it out, or --device=emulated.")


@contextmanager
def _interrupts_told(run_dir: RunDir, progress: Progress) -> Iterator[None]:
    """After an interrupt, say where a run stands that has begun."""
    try:
        yield
    except KeyboardInterrupt:
        if run_dir.run_json.exists():
            kept = f"Finished profiles are kept in {run_dir.root}; the same command continues there."
            progress.say(f"Interrupted. {kept}")
        raise


@contextmanager
def _open_run(spec: RunSpec, out: Path | None, *, fresh: bool) -> Iterator[RunDir]:
    """The run's folder, locked; it is removed again if nothing was put into it."""
    folder, lock = _named_folder(out) if out else _default_folder(spec, fresh=fresh)
    try:
        yield RunDir(folder)
    finally:
        with suppress(OSError):  # someone may have put a file there meanwhile, or removed the folder
            if [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()
        os.close(lock)


def _named_folder(folder: Path) -> tuple[Path, int]:
    try:
        folder.name.encode()  # it goes into run.json
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "run.json").exists() and any(path.name != LOCK for path in folder.iterdir()):
            raise UsageError(f"{folder} holds files, but no run.", remedy="Name an empty or a new folder with --out.")
        lock = _lock(folder)
    except UnicodeEncodeError:
        raise UsageError(f"{folder}: the name is not UTF-8.", remedy="Name another with --out.") from None
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"{folder} is not a folder.", remedy="Name a new one with --out.") from None
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}.", remedy="Name another with --out.") from None
    if lock is None:
        raise UsageError(
            f"Another process works on {folder}.", remedy="Wait for it, or name another folder with --out."
        )
    return folder, lock


def _default_folder(spec: RunSpec, *, fresh: bool) -> tuple[Path, int]:
    if not fresh:
        for folder in reversed(run_folders()):
            lock = _lock(folder) if _continues(folder, spec) else None
            if lock is not None:
                return folder, lock
    stem = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{spec.device}"
    for number in range(1, 100):
        folder = RESULTS / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(
                f"{RESULTS.absolute()} cannot be written: {error.strerror}.", remedy="Name a folder with --out."
            ) from None
        lock = _lock(folder)
        if lock is not None:
            return folder, lock
    raise UsageError(f"There are too many runs named {stem}.", remedy="Name a folder with --out.")


def _lock(folder: Path) -> int | None:
    """An open, locked file descriptor, or ``None`` if another process holds it. The lock goes with the process."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    return descriptor


def _continues(folder: Path, spec: RunSpec) -> bool:
    """True if the folder holds an unfinished run of this very specification and software."""
    try:
        record = RunDir(folder).read()
    except InputError:
        return False  # another version of the kit wrote it: not ours to continue, and nothing is lost
    same = (
        record.spec == spec
        and record.kit_version == __version__
        and record.revision == revision()
        and record.versions == versions()
    )
    return same and (bool(_unfinished(record)) or not RunDir(folder).report.exists())


def _unfinished(record: RunRecord) -> list[tuple[str, int]]:
    """Captures that a run lacks; one that was skipped for a reason is not lacking."""
    done = {(c.profile, c.repeat) for c in record.captures if c.file or c.skipped}
    wanted = [(name, repeat) for repeat in range(1, record.spec.repeats + 1) for name in record.spec.profiles]
    return [capture for capture in wanted if capture not in done]


def _continued(run_dir: RunDir, spec: RunSpec, *, fresh: bool) -> str:
    if fresh or not run_dir.run_json.exists():
        return ""
    wanted = len(spec.profiles) * spec.repeats
    return f" (continued: {wanted - len(_unfinished(run_dir.read()))} of {wanted} captures are there)"


def _analyze_all(run_dir: RunDir, record: RunRecord, progress: Progress) -> KitError | None:
    """``analysis/*.json`` for every capture that lacks it; a failure is recorded and the first one returned."""
    first: KitError | None = None
    lacking = [capture for capture in record.captures if capture.file and not _analyzed(run_dir, capture)]
    for number, capture in enumerate(lacking, start=1):
        stem = run_dir.stem(capture.profile, capture.repeat)
        try:
            with progress.waiting(f"[{number}/{len(lacking)}] analysing {stem}"):
                write_json(
                    run_dir.analysis_path(capture.profile, capture.repeat),
                    analyze(run_dir.profile_path(capture.profile, capture.repeat)),
                )
            if capture.error and capture.error.startswith(_ANALYSIS_FAILED):
                capture.error = None
        except KitError as error:
            first = first or error
            capture.error = f"{_ANALYSIS_FAILED}{error.message}"
            progress.say(f"{stem}: {error}")
    run_dir.write(record)
    return first


def _analyzed(run_dir: RunDir, capture: CaptureRecord) -> bool:
    path = run_dir.analysis_path(capture.profile, capture.repeat)
    try:
        return path.exists() and read_json(path, Analysis, SCHEMA).sha256 == capture.sha256
    except InputError:
        return False  # of another kit version or damaged: made again
