"""One error class per kind of failure, each with the exit status it ends the process with.

The message is for the reader: what failed, on what, and what to do. ``cli.main`` prints it on one
line without a traceback; anything that is not a ``KitError`` is a bug in the kit and keeps its traceback.
"""

from __future__ import annotations


class KitError(Exception):
    """Base of every error that the reader can do something about.

    ``remedy`` says what to do next and is printed after the message.
    """

    exit_status = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class NotReproducedError(KitError):
    """A claim or an arm of an experiment did not reproduce, or a result failed its check."""

    exit_status = 1


class UsageError(KitError):
    """A flag, a value or a combination of them that the command does not take."""

    exit_status = 2


class InputError(KitError):
    """A file that cannot be read, is not what it claims to be, or was written by another kit version."""

    exit_status = 2


class MachineError(KitError):
    """This machine lacks something that was asked for (GPU, nsys, Docker, shared memory, the right Ray)."""

    exit_status = 3


class NoGpuActivityError(KitError):
    """A readable profile without GPU activity that an idle figure could be computed from."""

    exit_status = 4


class WaitTimeoutError(MachineError):
    """An external wait (nsys, Ray start, export, docker) ran into its limit; the message names what it waited for."""
