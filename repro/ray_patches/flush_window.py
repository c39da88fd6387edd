"""Build the flush-window library for a stock Ray wheel, and the environment that loads it into the raylet.

The library (patches/profiler_flush) keeps the raylet from signalling a profiler that still writes its report; the
Python patch ``profiler-flush-wait`` makes ``ray.shutdown()`` wait for it. The library alone keeps the reports, but they
may be whole only after ``ray.shutdown()`` has returned.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from repro.errors import InputError, MachineError, WaitTimeoutError
from repro.ray_patches.install import find_ray
from repro.ray_patches.series import PATCHES_DIR

SOURCE_DIR = PATCHES_DIR / "profiler_flush"
LIBRARY = "libprofiler_flush.so"
WARDEN = "profiler_flush_warden"
BUILD_LIMIT_S = 300.0


def build(build_dir: Path) -> Path:
    """Compile what is older than its sources into ``build_dir`` and return the library.

    The library starts ``profiler_flush_warden`` from its own folder: keep the two together. Where both are there and
    newer than every source, no compiler is needed.
    """
    library = build_dir.resolve() / LIBRARY
    built = [library, library.with_name(WARDEN)]
    sources = [*SOURCE_DIR.glob("*.cc"), *SOURCE_DIR.glob("*.h"), SOURCE_DIR / "Makefile"]
    newest = max(source.stat().st_mtime for source in sources)
    if all(file.exists() and file.stat().st_mtime >= newest for file in built):
        return library
    for tool in ("make", os.environ.get("CXX", "g++")):
        if shutil.which(tool) is None:
            raise MachineError(
                f"building the flush-window library needs {tool}, which is not on PATH.",
                remedy="Debian: apt-get install -y --no-install-recommends g++ make",
            )
    command = ["make", "-s", "-C", str(SOURCE_DIR), f"OUT={library.parent}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise WaitTimeoutError(f"building {library} took more than {BUILD_LIMIT_S:.0f} s.") from error
    if done.returncode != 0:
        raise MachineError(f"building {library} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return library


def environment(
    library: Path, *, ray_dir: Path | None = None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables to set before ``ray.init`` or ``ray start``, so that the raylet loads ``library``.

    Ray preloads one colon-separated list into the processes it starts, by default its own jemalloc: that one, or the
    one already chosen in ``environ``, stays behind ours. Ray leaves an LD_PRELOAD that is set alone, so then the
    library goes in front there. ``ray_dir`` is the installed ``ray`` package, by default this interpreter's.
    """
    if any(mark in str(library) for mark in ": "):
        raise InputError(
            f"the library's path {str(library)!r} has a colon or blank, which separate libraries in LD_PRELOAD.",
            remedy="Build it in another folder.",
        )
    if environ.get("LD_PRELOAD"):
        return {"LD_PRELOAD": _in_front(library, environ["LD_PRELOAD"])}
    chosen = environ.get("RAY_JEMALLOC_LIB_PATH")
    if chosen is None:
        bundled = find_ray(ray_dir) / "core" / "libjemalloc.so"
        chosen = str(bundled) if bundled.exists() else ""
    return {"RAY_JEMALLOC_LIB_PATH": _in_front(library, chosen)}


def loaded(raylet_pid: int) -> bool:
    """Whether the running raylet has the library in its memory."""
    try:
        maps = Path(f"/proc/{raylet_pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"cannot look into process {raylet_pid}: {error.strerror}.") from error
    return f"/{LIBRARY}\n" in maps


def _in_front(library: Path, others: str) -> str:
    rest = [other for other in others.replace(" ", ":").split(":") if other and other != str(library)]
    return ":".join([str(library), *rest])
