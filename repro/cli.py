"""The kit's commands (Fire): check arguments, call one room, print, set the exit status.

A command is one function here, added to ``COMMANDS``: keyword-only parameters are flags, annotations convert and check
their values (:mod:`repro.commandline`), the docstring is the help text, the returned integer the exit status. Rooms are
imported inside the functions, so that help and ``report`` start without Ray.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from repro import __version__
from repro.commandline import Commands, run
from repro.errors import KitError
from repro.text import one_line

ABOUT: Final = (
    f'gpu-idle-repro {__version__}: the seven profiles of the dataset "Ray Data GPU Idle Profiles (B200)",\n'
    "captured, analysed and set beside the published table on your machine."
)
STATUSES: Final = """\
Exit status: 0 done, 1 a claim or an arm did not reproduce, 2 usage or an unreadable or foreign input,
3 this machine lacks something that was asked for, 4 a profile without usable GPU activity, 130 interrupted."""
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141


def profiles() -> int:
    """List the seven profiles and what was published of them."""
    from repro.report.tables import profiles_table

    _show(profiles_table())
    return 0


COMMANDS: Final[Commands] = {
    "profiles": profiles,
}


def _show(*renderables: Any) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    for renderable in renderables:
        console.print(renderable)


def _complain(error: KitError) -> None:
    print(f"error: {one_line(str(error))}", file=sys.stderr)  # noqa: T201 - the error line of every command


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m repro``; returns the exit status.

    A ``KitError`` is one line on stderr and its own status. Any other exception is a bug and keeps its traceback.
    """
    try:
        status = run(sys.argv[1:] if arguments is None else arguments, COMMANDS, about=ABOUT, closing=STATUSES)
        sys.stdout.flush()
    except KitError as error:
        _complain(error)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout went away (`| head`); the interpreter's own flush at exit would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return status
