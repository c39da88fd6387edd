"""The kit's commands (Fire): check arguments, call one room, print, set the exit status.

A command is one function here, added to ``COMMANDS``: keyword-only parameters are flags, annotations convert and check
their values (:mod:`repro.commandline`), the docstring is the help text, the returned integer the exit status. Rooms are
imported inside the functions, so that help and ``report`` start without Ray.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator

from repro import __version__
from repro.commandline import Command, Commands, Shown, closest, run
from repro.errors import KitError, MachineError, UsageError
from repro.procs import terminate_as_interrupt
from repro.spec import PROFILES, PUBLISHED, RunSpec
from repro.text import one_line

ABOUT: Final = (
    f'gpu-idle-repro {__version__}: the seven profiles of the dataset "Ray Data GPU Idle Profiles (B200)",\n'
    "captured, analysed and set beside the published table on your machine."
)
STATUSES: Final = """\
Exit status: 0 done, 1 a claim or an arm did not reproduce, 2 usage or an unreadable or foreign input,
3 this machine lacks something that was asked for, 4 a profile without usable GPU activity, 130 interrupted."""
IMAGE: Final = "gpu-idle-repro"
RESULTS: Final = Path("results")
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141
_REFUSED: Final = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
)
_IMPOSSIBLE: Final = (errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)
"""What a system answers to a name that no file can have, or that something else has. Errors of its calls in neither
list are bugs of the kit."""


def _profile_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in PROFILES:
            near = closest(name, PROFILES) or f"There are {', '.join(PROFILES)}."
            raise ValueError(f"there is no profile {name!r}. {near}")
        if names.count(name) > 1:
            raise ValueError(f"{name} is named twice")
    if not names:
        raise ValueError(f"name at least one of {', '.join(PROFILES)}")
    return tuple(name for name in PROFILES if name in names)  # one order, so that one set is one specification


def _payload(text: str) -> str | int:
    if text in ("auto", "full"):
        return text
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise ValueError("should be auto, full or a number of rows of at least 1")


def _arms(text: str) -> tuple[str, ...]:
    from repro.ray_bugs.flush_race import parse_arms

    return parse_arms(text)


_ProfileNames = Annotated[Any, BeforeValidator(_profile_names), Shown("NAME,NAME")]
_Payload = Annotated[Any, BeforeValidator(_payload), Shown("auto|full|ROWS")]
_Dir = Annotated[Path, Shown("DIR")]
_Image = Annotated[str, Shown("NAME")]
_Args = Annotated[str | None, Shown('"--FLAG=VALUE ..."')]
_DEFAULTS: Final = {name: field.default for name, field in RunSpec.model_fields.items()}


def reproduce(
    *,
    profiles: _ProfileNames = PUBLISHED,
    device: Literal["auto", "cuda", "emulated"] = "auto",
    device_model: Annotated[str, Shown("NAME|FILE")] = _DEFAULTS["device_model"],
    profiler: Literal["auto", "nsys", "torch"] = "auto",
    repeats: int = _DEFAULTS["repeats"],
    out: _Dir | None = None,
    blocks: int = _DEFAULTS["blocks"],
    rows: int = _DEFAULTS["rows"],
    cols: int = _DEFAULTS["cols"],
    matmuls: int = _DEFAULTS["matmuls"],
    prep_ms: Annotated[float, Shown("MS")] = _DEFAULTS["prep_ms"],
    payload: _Payload = _DEFAULTS["payload"],
    fresh: bool = False,
    stock_ray: bool = False,
    address: Annotated[str | None, Shown("HOST:PORT")] = None,
) -> int:
    """Capture the profiles, analyse them, write the report and print its table.

    Each profile is one run of a real Ray Data pipeline; together they take about two minutes. A run that was
    interrupted is continued by the same command: the newest unfinished run of the same specification under results/
    gets what it lacks. A finished run is never touched, the command starts a new one.

    Args:
        profiles: Which of the seven to capture, by name ("python -m repro profiles" lists them).
        device: cuda is a GPU, emulated a time model of one. auto takes CUDA where it works, and the emulated device
            where there is no trace of a GPU; a GPU that cannot be used is an error.
        device_model: The emulated device: a model of the kit or a .toml file.
        profiler: What records on CUDA: nsys (auto) or torch's profiler, for machines without nsys. nsys on the emulated
            device records the pipeline's ranges and no device.
        repeats: Captures of each profile; differences are taken within a repeat.
        out: Folder of the run, instead of a new one under results/. One that holds an unfinished run of the same
            specification is continued.
        blocks: Blocks of the dataset; one block is one batch and one task.
        rows: Rows of a batch.
        cols: Columns of a batch, float32.
        matmuls: Matrix multiplications on a batch.
        prep_ms: CPU time of preparing a batch.
        payload: Rows of a batch that really travel through Ray on the emulated device. auto is as many as this
            machine's cores can feed; copies and kernels are accounted at the full batch in any case.
        fresh: Start a new run, or capture everything again in the folder of --out.
        stock_ray: Run on Ray as released, without the patches that some profiles need.
        address: Join this Ray cluster instead of starting one. The GPU stage runs on a node with a GPU, and its files
            are fetched from there. Its nodes need this kit's Python packages, and the patches on Ray before Ray starts.
    """
    from repro.analysis.claims import all_reproduced
    from repro.progress import Progress
    from repro.report.tables import claims_table, result_table
    from repro.reproduce import reproduce as room

    spec = {
        "profiles": profiles,
        "device_model": device_model,
        "repeats": repeats,
        "blocks": blocks,
        "rows": rows,
        "cols": cols,
        "matmuls": matmuls,
        "prep_ms": prep_ms,
        "payload": payload,
        "stock_ray": stock_ray,
    }
    outcome = room(spec, device=device, profiler=profiler, out=out, fresh=fresh, progress=Progress(), address=address)
    _show(result_table(outcome.model), claims_table(outcome.model))
    print(f"Report: {outcome.model.run_dir.report}")  # noqa: T201 - where the report is
    if outcome.error:
        raise outcome.error
    return 0 if all_reproduced(outcome.model.claims) else 1


def analyze(
    file: Annotated[Path, Shown("FILE")],
    *,
    device_id: int | None = None,
    format: Literal["table", "json"] = "table",
) -> int:
    """Say how one device of a profile spent its time: busy, copying while idle, waiting.

    The file is an Nsight Systems SQLite export, of this kit or not, or a report of nsys, which is exported to a
    temporary file first; it is never written to.

    Args:
        file: The profile.
        device_id: The device to analyse, where kernels ran on several.
        format: json prints one object, schema repro.analysis/1.
    """
    from repro.analysis import analyze as room
    from repro.capture.nsys import sqlite_of
    from repro.progress import Progress
    from repro.report.tables import analysis_table
    from repro.results import sha256_of

    progress = Progress(quiet=not (sys.stderr and sys.stderr.isatty()))  # for scripts, the answer alone
    with progress.waiting(f"Analysing {file.name}"), sqlite_of(file) as exported:
        analysis = room(exported, device_id)
    if exported != file:
        analysis = analysis.model_copy(update={"file": file.name, "sha256": sha256_of(file)})
    if format == "json":
        print(analysis.model_dump_json(by_alias=True, indent=1))  # noqa: T201 - the command's output
    else:
        _show(analysis_table(analysis))
    return 0


def report(run: Annotated[str | None, Shown("RUN")] = None) -> int:
    """Render the report of a run again, from its files alone.

    Args:
        run: A run's folder, or its name under results/; the newest run if left out.
    """
    from repro.report import find_run, write_report
    from repro.report.tables import claims_table, result_table

    model = write_report(find_run(run))
    _show(result_table(model), claims_table(model))
    print(f"Report: {model.run_dir.report}")  # noqa: T201 - where the report is
    return 0


def profiles() -> int:
    """List the seven profiles with what was published of them, and the two that the kit adds."""
    from repro.report.tables import profiles_table

    _show(profiles_table())
    return 0


def doctor(*, format: Literal["table", "json"] = "table") -> int:
    """Say what this machine can run, what it cannot, and what to do about it.

    Status 3 if it cannot run reproduce on the device that reproduce would take by itself.

    Args:
        format: json prints one object, schema repro.doctor/1.
    """
    from repro.doctor import doctor as room
    from repro.doctor import tables

    found = room()
    if format == "json":
        print(found.model_dump_json(by_alias=True, indent=1))  # noqa: T201 - the command's output
    else:
        _show(*tables(found))
    return found.exit_status


def flush_race(
    *,
    arms: Annotated[Any, BeforeValidator(_arms), Shown("ARM,ARM")] = None,
    repeats: int = 3,
    nsys: Literal["auto", "real", "stand-in"] = "auto",
    report_mb: Annotated[float | None, Shown("MB")] = None,
    actors: int = 1,
    image: Annotated[str | None, Shown("NAME")] = None,
    out: _Dir | None = None,
) -> int:
    """Show that ray.shutdown() loses the reports of profiled actors, and that the flush window keeps them.

    Every repeat is a Ray cluster of its own with profiled actors; the arms differ only in the teardown and in the Ray
    they run. Status 0 if stock+immediate loses reports and fixed+immediate keeps all of them.

    Args:
        arms: Some of stock+wait, stock+immediate, fixed+immediate and container; all of them if left out.
        repeats: Repeats of each arm.
        nsys: The real Nsight Systems or a stand-in with its process structure. auto takes the real one where it is.
        report_mb: Size of a report to aim at; the bigger, the longer its export. 64 with the real nsys, 1 without.
        actors: Profiled actors of a repeat.
        image: Image that the container arm runs.
        out: Folder for the result, instead of a new one under results/.
    """
    from repro.preflight import check_folder, check_programs
    from repro.progress import Progress
    from repro.ray_bugs import flush_race as room
    from repro.ray_bugs.flush_model import ARMS

    check_folder(out or RESULTS)
    check_programs()
    result, folder = room.run(arms or ARMS, repeats, nsys, report_mb, out, Progress(), actors=actors, image=image)
    _show(room.table(result))
    print(f"Result: {folder / 'flush_race.md'}")  # noqa: T201 - where the result is
    return result.exit_status


def nsight_command(*, nsys: Literal["auto", "real", "stand-in"] = "auto", out: _Dir | None = None) -> int:
    """Show that Ray's nsight plugin drops the worker's Python command, and that the patch keeps it.

    Status 0 if every case fails on stock Ray and starts as chosen with the patch.

    Args:
        nsys: The real Nsight Systems or a stand-in that starts its target. auto takes the real one where it is.
        out: Folder for the result, instead of a new one under results/.
    """
    from repro.preflight import check_folder, check_programs
    from repro.progress import Progress
    from repro.ray_bugs import nsight_command as room

    check_folder(out or RESULTS)
    check_programs()
    result, folder = room.run(nsys, out, Progress())
    _show(room.table(result))
    print(f"Result: {folder / 'nsight_command.md'}")  # noqa: T201 - where the result is
    return result.exit_status


def _patches_command(name: Literal["status", "verify", "apply", "revert"], summary: str) -> Command:
    def command(*, ray: Annotated[Path | None, Shown("DIR")] = None) -> int:
        from repro import ray_patches
        from repro.report.tables import patches_table

        _show(patches_table(getattr(ray_patches, name)(ray)))
        return 0

    command.__doc__ = f"""{summary}

    Args:
        ray: Its package, the site-packages folder or the checkout that holds it. Without it, the Ray that this Python
            would import.
    """
    return command


def host_build(
    *,
    image: _Image = IMAGE,
    base_image: Annotated[str | None, Shown("NAME")] = None,
    nsight_source: Literal["nvidia", "debian"] = "nvidia",
    ray_build: Literal["wheel", "source"] = "wheel",
    torch_spec: Annotated[str | None, Shown("SPEC|none")] = None,
    ca: Annotated[Path | None, Shown("FILE")] = None,
    network: Annotated[str | None, Shown("NAME")] = None,
) -> int:
    """Build the image from this source tree with BuildKit.

    Args:
        image: Name of the image.
        base_image: Another base than the Dockerfile's.
        nsight_source: debian takes Nsight Systems from Debian, for machines without NVIDIA's repository.
        ray_build: source compiles Ray with the C++ fix (hours); wheel takes Ray's own build.
        torch_spec: Another PyTorch than the Dockerfile's, or none.
        ca: A CA bundle for the downloads of the build.
        network: Network of the build, e.g. host.
    """
    from repro.host.build import build

    arguments = {
        "BASE_IMAGE": base_image,
        "NSIGHT_SOURCE": nsight_source,
        "RAY_BUILD": ray_build,
        "TORCH_SPEC": torch_spec,
    }
    flags = [f"--secret=id=ca,src={ca}"] if ca else []
    flags += [f"--network={network}"] if network else []
    build(image, arguments={name: value for name, value in arguments.items() if value}, flags=flags)
    print(f"Image: {image}")  # noqa: T201 - what was built
    return 0


def host_check() -> int:
    """Say whether a container on this machine gets a GPU; status 3 and the reason if not."""
    from repro.host.engine import no_gpu_container

    problem = no_gpu_container()
    if problem:
        print(f"No container with a GPU: {one_line(problem)}")  # noqa: T201 - the command's answer
        return MachineError.exit_status
    print("A container gets the GPU.")  # noqa: T201 - the command's answer
    return 0


def _container_command(name: str, summary: str) -> Command:
    def command(
        *,
        args: _Args = None,
        image: _Image = IMAGE,
        results: _Dir = RESULTS,
        gpus: Literal["auto", "all", "none"] = "auto",
        shm_size: Annotated[str, Shown("SIZE")] = "3g",
    ) -> int:
        return _in_container(name, args, image, results, gpus, shm_size)

    command.__doc__ = f"""{summary}

    Args:
        args: Flags for {name}, as one text.
        image: The image to run.
        results: Folder of the results.
        gpus: auto asks for the GPUs where this machine has some; a GPU that a container cannot get is an error.
        shm_size: Shared memory of the container; Ray's objects take 2 GiB.
    """
    return command


def host_report(*, args: _Args = None, image: _Image = IMAGE, results: _Dir = RESULTS) -> int:
    """Render the report of a run again with the image's kit.

    Args:
        args: The run's name under the results, if not the newest.
        image: The image to run.
        results: Folder of the results.
    """
    return _in_container("report", args, image, results, "none", "64m")


def _in_container(
    command: str, args: str | None, image: str, results: Path, gpus: Literal["auto", "all", "none"], shm_size: str
) -> int:
    from repro.host.container import run as run_container

    try:
        flags = shlex.split(args or "")
    except ValueError as error:
        raise UsageError(f"--args={one_line(args or '')}: {error}.") from None
    return run_container(command, flags, image=image, results=results, gpus=gpus, shm_size=shm_size)


COMMANDS: Final[Commands] = {
    "reproduce": reproduce,
    "report": report,
    "analyze": analyze,
    "profiles": profiles,
    "doctor": doctor,
    "flush-race": flush_race,
    "nsight-command": nsight_command,
    "host": {
        "build": host_build,
        "check": host_check,
        "reproduce": _container_command("reproduce", "Run reproduce in a container; the results are on this machine."),
        "flush-race": _container_command("flush-race", "Run flush-race in a container; the result is on this machine."),
        "report": host_report,
        "doctor": _container_command("doctor", "Say what a container on this machine can run."),
    },
    "patches": {
        "status": _patches_command(
            "status", "Say which patches of the series are on a Ray, and which files are why not."
        ),
        "verify": _patches_command(
            "verify",
            "Check that every patch is applied and is what Python would run; status 3 and the reason if not.",
        ),
        "apply": _patches_command("apply", "Apply the series to an installed Ray; all of it or nothing."),
        "revert": _patches_command("revert", "Take the series off an installed Ray, byte for byte."),
    },
}


def _show(*renderables: Any) -> None:
    from repro.progress import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    for renderable in renderables:
        console.print(renderable)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m repro``; returns the exit status.

    A ``KitError``, and what the system refuses (a full disk, a folder that is not ours), is one line on stderr and a
    status. Any other exception is a bug and keeps its traceback.
    SIGTERM (``docker stop``) ends a command as Ctrl-C does: its processes are ended, and what is finished is kept.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets a question mark, no traceback
    try:
        status = _status(sys.argv[1:] if arguments is None else arguments)
        if sys.stdout:
            sys.stdout.flush()  # here, where a write that fails can still be told
        return status
    except BrokenPipeError:  # the reader went away (`| head`)
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno not in (*_REFUSED, *_IMPOSSIBLE):
            raise
        kind = MachineError if error.errno in _REFUSED else UsageError
        _complain(kind(f"{error.filename or 'Output'}: {error.strerror}."))
        _discard_output()
        return kind.exit_status


def _status(arguments: list[str]) -> int:
    try:
        with terminate_as_interrupt():
            return run(arguments, COMMANDS, about=ABOUT, closing=STATUSES)
    except KitError as error:
        _complain(error)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        return INTERRUPTED


def _complain(error: KitError) -> None:
    with suppress(OSError):  # the status still tells a caller who closed stderr
        print(f"error: {one_line(str(error))}", file=sys.stderr)  # noqa: T201 - the error line of every command


def _discard_output() -> None:
    """Send what stdout and stderr still hold nowhere, or the interpreter's own flush at exit would fail once more."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
