#!/usr/bin/env -S python3 -I -S
"""A stand-in for NVIDIA's ``nsys`` with its process structure and its slow export, and nothing measured.

Standard library only, so that a copy of this one file runs anywhere; ``--install DIR`` puts one there as ``nsys``.

``nsys profile [options] command...`` starts, as Nsight Systems 2023.4 does,

- a helper named ``nsys-launcher`` in its own process group, which starts the command in a session of its own,
- an agent named ``nsys`` in a session of its own, adopted by init, which exports the report in a child named
  ``QdstrmImporter`` once the command is gone; the profiler itself only waits for it and burns no CPU time.

What ends early ends as it does there: a SIGKILL of the profiler leaves an agent that finishes the report, a SIGTERM
makes the agent abandon it with a ``.qdstrm`` in the temporary folder. With ``NSYS_STAND_IN_GROUP=shared`` launcher,
command and export stay in the profiler's own process group, so that a signal for the command's group hits the export.

An export is an empty report and a growing ``.qdstrm`` in the temporary folder, then a growing report, then nothing but
the whole report. Exit status: the command's.

``nsys export --type sqlite -o OUT REPORT`` writes a small SQLite file and fails for a report that is not whole.

Knobs, all environment variables, for every report but Ray's own trial (``TRIAL``):

- ``NSYS_STAND_IN_EXPORT_S``: seconds of exporting (3); ``NSYS_STAND_IN_REPORT_BYTES``: size of the report (1,000,000)
- ``NSYS_STAND_IN_MODE``: ``normal``; ``hang`` (half a report, then neither CPU time nor output); ``for-ever`` (the
  report grows without end); ``busy`` (CPU time without end, no output); ``empty``, ``partial`` (only the
  ``.qdstrm``), ``corrupt`` and ``missing`` (what is left in the end)
- ``NSYS_STAND_IN_GROUP``: ``separate`` or ``shared``
- ``NSYS_STAND_IN_LIFE_S``: an export ends itself after that many seconds whatever its mode (900)
"""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VERSION = "nsys stand-in 1 (reproduces the process structure only; not NVIDIA Nsight Systems)"
MODES = ("normal", "hang", "for-ever", "busy", "empty", "partial", "corrupt", "missing")

TRIAL = "empty"
"""Name of the report of the run with which Ray's nsight plugin tries its options; the knobs are not for that one."""

_HEAD = b"nsys stand-in report\n"
_TAIL = b"\nend of stand-in report, %012d bytes\n"
_TICK_S = 0.05


def install(directory: Path, *, python: str = sys.executable) -> Path:
    """Put ``nsys`` into ``directory`` and return it; ``python`` may hold blanks and need not be on PATH."""
    directory.mkdir(parents=True, exist_ok=True)
    program = directory.resolve() / "nsys_stand_in.py"
    shutil.copyfile(__file__, program)
    nsys = directory / "nsys"
    nsys.write_text(f'#!/bin/sh\nexec {shlex.quote(python)} -I -S {shlex.quote(str(program))} "$@"\n', encoding="utf-8")
    nsys.chmod(0o755)
    return nsys


def _refuse(reason: str, *, status: int = 1) -> int:
    sys.stderr.write(f"nsys stand-in: {reason}\n")
    return status


def _name(name: str) -> None:
    """What ``ps`` and /proc/PID/comm show; the real one's processes are found by it."""
    Path("/proc/self/comm").write_text(name, encoding="utf-8")


def _options(args: list[str]) -> tuple[dict[str, str], list[str]]:
    """``--name=value``, ``--name value`` and ``-n value`` up to the first word that is none of them."""
    options: dict[str, str] = {}
    rest = list(args)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if not equals:
            value = rest.pop(0) if rest else ""
        options[name.lstrip("-")] = value
    return options, rest


def _start(word: str, *args: str, stdin: int | None = None, stdout: int | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-I", "-S", __file__, word, *args], stdin=stdin, stdout=stdout)


def _wait_for(pid: int, commands: int | None = None) -> bool:
    """Sleep until ``pid``, a child or not, has ended: True. False: the ``commands`` pipe said to abandon."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        while True:
            ready, _, _ = select.select([process] if commands is None else [process, commands], [], [])
            if process in ready:
                return True
            if commands is not None and os.read(commands, 1) == b"a":
                return False
            commands = None  # the profiler is gone: nobody is left to change our mind
    finally:
        os.close(process)


def _profile(args: list[str]) -> int:
    options, command = _options(args)
    if not command:
        return _refuse("profile needs a command")
    mode = os.environ.get("NSYS_STAND_IN_MODE", "normal")
    if mode not in MODES:
        return _refuse(f"unknown NSYS_STAND_IN_MODE {mode!r}")
    shared = os.environ.get("NSYS_STAND_IN_GROUP", "separate") == "shared"
    _name("nsys")
    commands_read, commands = os.pipe()
    done, done_write = os.pipe()
    _start("--start-agent", f"--session-name=profile-{os.getpid()}", stdin=commands_read, stdout=done_write).wait()
    os.close(commands_read)
    os.close(done_write)

    def abandon(*_: object) -> None:
        os.write(commands, b"a")
        sys.exit(128 + signal.SIGTERM)

    if not shared:
        signal.signal(signal.SIGTERM, abandon)
    launcher = _start("--launcher", "shared" if shared else "separate", *command, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    target = int(launcher.stdout.readline() or 0)
    report = options.get("o") or options.get("output") or "report1"
    report = str(Path(report.replace("%p", str(target)).removesuffix(".nsys-rep") + ".nsys-rep").absolute())
    if target and not shared:
        os.write(commands, json.dumps({"target": target, "report": report, "mode": mode}).encode() + b"\n")
    status = launcher.wait()
    if not target:
        return status
    _wait_for(target)  # the launcher may have been killed before it
    if shared:
        _export_report(Path(report), mode)
    else:
        os.read(done, 1)  # end of file: the agent has ended
    return status if status >= 0 else 128 - status


def _launch(group: str, command: list[str]) -> int:
    """Runs in the profiler's process group: start the target, say its pid, wait for it."""
    _name("nsys-launcher")
    said = os.dup(1)
    os.dup2(2, 1)  # the target's output goes where errors go: our stdout is the pipe to the profiler
    try:
        target = subprocess.Popen(command, start_new_session=group == "separate")
    except OSError as error:
        return _refuse(f"{command[0]}: {error.strerror}", status=127)
    os.write(said, f"{target.pid}\n".encode())
    os.close(said)
    status = target.wait()
    return status if status >= 0 else 128 - status


def _agent() -> int:
    """Detach into a session of its own; export when the target has ended, whatever becomes of the profiler."""
    if os.fork():
        return 0
    os.setsid()
    _name("nsys")
    line = b""
    while not line.endswith(b"\n"):
        character = os.read(0, 1)
        if not character:
            return 0
        line += character
    job = json.loads(line)
    if not _wait_for(job["target"], 0):
        return 1
    importer = os.fork()
    if not importer:
        _name("QdstrmImporter")
        _export_report(Path(job["report"]), job["mode"])
        return 0
    if not _wait_for(importer, 0):
        os.kill(importer, signal.SIGKILL)
    os.waitpid(importer, 0)
    return 0


def _export_report(report: Path, mode: str) -> None:
    """Write what ``mode`` leaves behind, over NSYS_STAND_IN_EXPORT_S seconds."""
    signal.alarm(int(os.environ.get("NSYS_STAND_IN_LIFE_S", "900")))
    trial = report.stem == TRIAL
    seconds = 0.0 if trial else float(os.environ.get("NSYS_STAND_IN_EXPORT_S", "3"))
    size = int(os.environ.get("NSYS_STAND_IN_REPORT_BYTES", "1000000"))
    payload = max(0, size - len(_HEAD) - len(_TAIL % 0))
    stream = Path(tempfile.gettempdir()) / f"nsys-report-{os.getpid():x}.qdstrm"
    if trial:
        mode = "normal"
    if mode in ("missing", "partial"):
        _grow(stream, size, seconds)
        if mode == "missing":
            stream.unlink()
        return
    report.touch()
    _grow(stream, size, seconds / 2)
    if mode == "empty":
        time.sleep(seconds / 2)
        stream.unlink()
        return
    report.write_bytes(_HEAD)
    if mode == "hang":
        _grow(report, payload // 2, seconds / 2)
        while True:
            signal.pause()
    while mode == "busy":
        pass
    while mode == "for-ever":
        _grow(report, 1000, _TICK_S)
    _grow(report, payload, seconds / 2)
    if mode == "normal":
        with report.open("ab") as file:
            file.write(_TAIL % payload)
    stream.unlink()


def _grow(path: Path, size: int, seconds: float) -> None:
    """Append ``size`` bytes to ``path``, spread evenly over ``seconds``."""
    started = time.monotonic()
    written = 0
    with path.open("ab", buffering=0) as file:
        while True:
            elapsed = time.monotonic() - started
            due = size if elapsed >= seconds else int(size * elapsed / seconds)
            if due > written:
                written += file.write(bytes(min(due - written, 1 << 20)))
            if written >= size and elapsed >= seconds:
                return
            if written >= due:
                time.sleep(_TICK_S)


def _export(args: list[str]) -> int:
    options, files = _options(args)
    out = options.get("o") or options.get("output")
    if len(files) != 1 or not out:
        return _refuse("export needs --output and one report")
    try:
        data = Path(files[0]).read_bytes()
    except OSError as error:
        return _refuse(f"{files[0]}: {error.strerror}")
    payload = data.rfind(b"\nend of stand-in report") - len(_HEAD)
    if not data.startswith(_HEAD) or payload < 0 or not data.endswith(_TAIL % payload):
        return _refuse(f"{files[0]} is not a whole report")
    Path(out).unlink(missing_ok=True)
    database = sqlite3.connect(out)
    with database:
        database.execute("CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT)")
        database.execute("INSERT INTO META_DATA_EXPORT VALUES ('STAND_IN', ?)", (VERSION,))
    database.close()
    return 0


def main(args: list[str]) -> int:
    word, rest = (args[0], args[1:]) if args else ("", [])
    if word == "--version":
        sys.stdout.write(f"{VERSION}\n")
        return 0
    if word == "profile":
        return _profile(rest)
    if word == "export":
        return _export(rest)
    if word == "--install":
        install(Path(rest[0]))
        return 0
    if word == "--launcher":
        return _launch(rest[0], rest[1:])
    if word == "--start-agent":
        return _agent()
    return _refuse("knows profile, export and --version")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
