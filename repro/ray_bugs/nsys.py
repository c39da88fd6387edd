"""Which ``nsys`` an experiment runs with: the real one, or the kit's stand-in for its process structure."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from repro.errors import MachineError, WaitTimeoutError
from repro.ray_bugs import nsys_stand_in
from repro.text import one_line

Choice = Literal["auto", "real", "stand-in"]

VERSION_LIMIT_S: Final = 60.0
STAND_IN: Final = Path(nsys_stand_in.__file__)


@dataclass(frozen=True)
class Nsys:
    """``command`` runs it. Ray wants an ``nsys`` on PATH, so the stand-in is installed where it is to find one."""

    kind: Literal["real", "stand-in"]
    version: str
    command: tuple[str, ...]


def choose(asked: Choice) -> Nsys:
    """The nsys on PATH, or the stand-in where it was asked for or (``auto``) PATH has none.

    ``MachineError`` if the real one was asked for and is missing, or if it is there and does not run.
    """
    found = shutil.which("nsys")
    if asked == "stand-in" or (asked == "auto" and not found):
        return Nsys("stand-in", nsys_stand_in.VERSION, (sys.executable, "-I", "-S", str(STAND_IN)))
    if not found:
        raise MachineError(
            "There is no nsys on PATH.",
            remedy="Install Nsight Systems (docker/install-nsight), or use --nsys=stand-in.",
        )
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=VERSION_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise WaitTimeoutError(f"{found} --version did not answer within {VERSION_LIMIT_S:.0f} s.") from None
    except OSError as error:
        raise MachineError(f"{found} does not run: {error.strerror}.") from None
    if done.returncode:
        raise MachineError(f"{found} --version failed: {one_line((done.stderr or done.stdout).strip())}.")
    return Nsys("real", one_line(done.stdout.strip()), (found,))
