"""Which ``nsys`` an experiment runs with: the real one, or the kit's stand-in for its process structure."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final, Literal

from repro.capture.nsys import Nsys, find_nsys
from repro.ray_bugs import nsys_stand_in

Choice = Literal["auto", "real", "stand-in"]

STAND_IN: Final = Path(nsys_stand_in.__file__)


def choose(asked: Choice) -> Nsys:
    """The nsys on PATH, or the stand-in where it was asked for or (``auto``) PATH has none.

    Ray wants an ``nsys`` on PATH, so the stand-in is installed where it is to find one. ``MachineError`` as of
    ``find_nsys``.
    """
    if asked == "stand-in" or (asked == "auto" and not shutil.which("nsys")):
        return Nsys("stand-in", nsys_stand_in.VERSION, (sys.executable, "-I", "-S", str(STAND_IN)))
    return find_nsys()
