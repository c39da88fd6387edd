"""Command line manners around Fire: checked arguments, help that reads well, values of the declared type.

Fire binds a command's flags and calls it, but only after the call does it notice what it could not use, and it guesses
the type of every value. So the arguments are checked here first, against the command's signature: an unknown command
or flag, a missing or repeated value and an extra argument are one-line ``UsageError``s with the nearest known name.
Fire then gets ``--flag=value`` strings only, and each value is converted to the parameter's annotation by pydantic.

A command is a function with annotated, keyword-capable parameters and a Google-style docstring (first line: what it
does; ``Args:`` one entry a flag). A ``bool`` parameter is a switch. The annotation :class:`Shown` names the value in
the help text.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import fire
from fire.decorators import SetParseFn
from fire.docstrings import parse as parse_docstring
from pydantic import TypeAdapter, ValidationError

from repro.errors import UsageError
from repro.text import one_line

Command = Callable[..., int]
Commands = Mapping[str, "Command | Mapping[str, Command]"]
"""Command name -> function returning an exit status, or a group: subcommand name -> function."""

PROGRAM: Final = "python -m repro"
_HELP: Final = ("--help", "-h")
_WIDTH: Final = 100


@dataclass(frozen=True)
class Shown:
    """What a flag's value is called in help text, as in ``Annotated[Path, Shown("DIR")]``."""

    name: str


@dataclass(frozen=True)
class _Parameter:
    """One flag or positional argument of a command."""

    name: str
    annotation: Any
    default: Any
    positional: bool
    text: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def switch(self) -> bool:
        return self.annotation is bool

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def value_name(self) -> str:
        base, shown = _unwrap(self.annotation)
        if shown:
            return shown
        choices = typing.get_args(base) if typing.get_origin(base) is Literal else ()
        return "|".join(map(str, choices)) or {int: "N", float: "X"}.get(base, "VALUE")

    @property
    def usage(self) -> str:
        if self.positional:
            name = self.value_name if self.value_name != "VALUE" else self.name.upper()
            return name if self.required else f"[{name}]"
        shown = self.flag if self.switch else f"{self.flag}={self.value_name}"
        return shown if self.required else f"[{shown}]"

    def convert(self, value: str) -> Any:
        try:
            return TypeAdapter(self.annotation).validate_strings(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
            given = self.usage.strip("[]") if self.positional else self.flag
            raise UsageError(
                f"{given}={one_line(value)}: {reason}{'' if reason[-1] in '.?' else '.'}",
                remedy=closest(value, _choices(self)),
            ) from None


def _unwrap(annotation: Any) -> tuple[Any, str]:
    """The annotation without ``Annotated`` and ``| None``, and the name it shows."""
    shown = ""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation, *extra = typing.get_args(annotation)
            shown = next((item.name for item in extra if isinstance(item, Shown)), shown)
            continue
        some = [part for part in typing.get_args(annotation) if part is not type(None)]
        if type(None) in typing.get_args(annotation) and len(some) == 1:
            annotation = some[0]
            continue
        return annotation, shown


def _choices(parameter: _Parameter) -> list[str]:
    base, _ = _unwrap(parameter.annotation)
    return [str(choice) for choice in typing.get_args(base)] if typing.get_origin(base) is Literal else []


def closest(name: str, known: Iterable[str]) -> str:
    """ "Did you mean ...?" with the known name that is nearest, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"Did you mean {close[0]}?" if close else ""


def _parameters(command: Command) -> dict[str, _Parameter]:
    texts = {
        arg.name: one_line(arg.description or "") for arg in parse_docstring(inspect.getdoc(command) or "").args or []
    }
    hints = typing.get_type_hints(command, include_extras=True)
    return {
        name: _Parameter(
            name,
            hints[name],
            parameter.default,
            parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD,
            texts.get(name, ""),
        )
        for name, parameter in inspect.signature(command).parameters.items()
    }


def _bind(path: str, command: Command, arguments: list[str]) -> dict[str, str]:
    """``arguments`` as parameter name -> text; ``UsageError`` for everything that the command does not take."""
    parameters = _parameters(command)
    flags = {parameter.flag: parameter for parameter in parameters.values()}
    open_positions = [parameter for parameter in parameters.values() if parameter.positional]
    help_hint = f"See {PROGRAM} {path} --help."
    bound: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        if token.startswith("-") and token != "-":
            name, equals, value = token.partition("=")
            name = name.replace("_", "-")
            parameter = flags.get(name)
            if parameter is None:
                raise UsageError(f"{path} has no flag {one_line(name)}.", remedy=closest(name, flags) or help_hint)
            if parameter.switch:
                value = value if equals else "true"
            elif not equals and rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            if not value:
                raise UsageError(f"{name} needs a value ({parameter.usage.strip('[]')}).", remedy=help_hint)
        else:
            if not open_positions:
                raise UsageError(f"{path} does not take the argument {one_line(token)!r}.", remedy=help_hint)
            parameter, value = open_positions[0], token
        if parameter.name in bound:
            raise UsageError(f"{parameter.flag} is given twice.")
        bound[parameter.name] = value
        if parameter in open_positions:
            open_positions.remove(parameter)
    missing = [
        parameter.usage for parameter in parameters.values() if parameter.required and parameter.name not in bound
    ]
    if missing:
        raise UsageError(f"{path} needs {' '.join(missing)}.", remedy=help_hint)
    return bound


def _for_fire(command: Command) -> Command:
    """``command`` as Fire calls it: with texts, which are converted before anything runs."""
    parameters = _parameters(command)

    @functools.wraps(command)
    def call(**texts: str) -> int:
        return command(**{name: parameters[name].convert(text) for name, text in texts.items()})

    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in parameters]
    )
    return SetParseFn(str)(call)


def run(arguments: list[str], commands: Commands, *, about: str, closing: str) -> int:
    """Check ``arguments``, let Fire call the command they name, and return its exit status.

    Help goes to stdout with status 0. Raises ``UsageError``, and whatever the command raises.
    """
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in _HELP:
        print(_help_all(commands, about, closing))  # noqa: T201 - help is this program's output
        return 0
    name, *rest = arguments
    found = commands.get(name)
    if found is None:
        what = "flag" if name.startswith("-") else "command"
        raise UsageError(
            f"There is no {what} {one_line(name)!r}.", remedy=closest(name, commands) or f"See {PROGRAM} --help."
        )
    path = [name]
    if isinstance(found, Mapping):
        if not rest or rest[0] in _HELP:
            print(_help_group(name, found))  # noqa: T201
            return 0
        if rest[0] not in found:
            remedy = closest(rest[0], found) or f"It has {', '.join(found)}."
            raise UsageError(f"{name} has no command {one_line(rest[0])!r}.", remedy=remedy)
        path.append(rest[0])
        found, rest = found[rest[0]], rest[1:]
    if any(token in _HELP for token in rest):
        print(_help_command(" ".join(path), found))  # noqa: T201
        return 0
    texts = _bind(" ".join(path), found, rest)
    call = _for_fire(found)
    for part in reversed(path):
        call = {part: call}  # type: ignore[assignment]
    flags = [f"--{key}={value}" for key, value in texts.items()]
    return fire.Fire(call, command=[*path, *flags], name=PROGRAM, serialize=lambda status: None)


def _summary(command: Command | Mapping[str, Command]) -> str:
    if isinstance(command, Mapping):
        return " | ".join(command)
    return (inspect.getdoc(command) or "").partition("\n")[0].rstrip(".")


def _table(rows: list[tuple[str, str]]) -> list[str]:
    """Two columns; the second wraps below itself, and starts on its own line where the first is long."""
    column = min(26, max((len(left) for left, _ in rows), default=0) + 4)
    lines = []
    for left, right in rows:
        wrapped = textwrap.wrap(right, _WIDTH - column, break_long_words=False, break_on_hyphens=False) or [""]
        first = f"  {left}"
        if len(first) + 2 > column:
            lines.append(first)
        else:
            lines.append(f"{first:<{column}}{wrapped.pop(0)}".rstrip())
        lines += [" " * column + line for line in wrapped]
    return lines


def _help_all(commands: Commands, about: str, closing: str) -> str:
    rows = [(name, _summary(command)) for name, command in commands.items()]
    usage = [f"Usage: {PROGRAM} COMMAND [--FLAG=VALUE ...]", f"       {PROGRAM} COMMAND --help"]
    return "\n".join([about, "", *usage, "", "Commands:", *_table(rows), "", closing])


def _help_group(name: str, group: Mapping[str, Command]) -> str:
    rows = [(sub, _summary(command)) for sub, command in group.items()]
    return "\n".join([f"Usage: {PROGRAM} {name} COMMAND [--FLAG=VALUE ...]", "", "Commands:", *_table(rows)])


def _help_command(path: str, command: Command) -> str:
    parameters = _parameters(command).values()
    usage = textwrap.wrap(
        " ".join([f"{PROGRAM} {path}", *(parameter.usage for parameter in parameters)]),
        _WIDTH - 7,
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = [("Usage: " if number == 0 else "         ") + line for number, line in enumerate(usage)]
    text = (inspect.getdoc(command) or "").partition("\nArgs:")[0].strip()
    rows = []
    for parameter in parameters:
        default = (
            "" if parameter.default in (None, False, inspect.Parameter.empty) else _shown_default(parameter.default)
        )
        left = parameter.usage.strip("[]")
        rows.append((left, f"{parameter.text} {default}".strip()))
    return "\n".join([*lines, "", text, *(["", "Arguments:", *_table(rows)] if rows else [])])


def _shown_default(default: Any) -> str:
    text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f"(default: {text})"
