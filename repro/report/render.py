"""The shared report style: Jinja templates of ``report_templates/`` to markdown, with escaping as the default.

In a template ``{{ value }}`` is data and comes out escaped, so that no name from a profile can make a table row, a
link or HTML. What is markdown by design is a :class:`Markdown` (or passes ``| raw``). ``None`` and undefined names are
errors: a figure that may be absent goes through ``| fixed``, which prints a dash.

Filters: ``raw`` (text is markdown already), ``code`` (inline code), ``fence`` (fenced block of several lines),
``fixed(digits, unit)`` (a number or a dash), ``signed(digits, unit)`` (with its sign), ``count`` (1,234).
"""

from __future__ import annotations

import html
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import jinja2

from repro.text import one_line, printable

TEMPLATES: Final = Path(__file__).resolve().parents[2] / "report_templates"
ABSENT: Final = "—"

_PUNCTUATION = re.compile(r"[\\`*\[\]|~$]|:(?=//)|(?<=www)\.", re.IGNORECASE)  # the last two make links by themselves
_EDGE_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")  # one inside a word cannot start emphasis
_BLOCK_START = re.compile(r"^(\s*)([#+=:-]|\d+[.)](?=\s|$))")


class Markdown(str):
    """Text that is markdown by design; templates print it as it is."""

    __slots__ = ()


def escape(text: object) -> Markdown:
    """``text`` as one line of literal markdown: it reads the same and does nothing."""
    if isinstance(text, Markdown):
        return text
    line = _PUNCTUATION.sub(r"\\\g<0>", one_line(str(text)))
    line = _EDGE_UNDERSCORE.sub(r"\_", line)
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Markdown(_BLOCK_START.sub(lambda match: f"{match[1]}{match[2][:-1]}\\{match[2][-1]}", line))


def code(text: object) -> Markdown:
    """Inline code. With a backtick or a pipe in it as HTML, which holds inside and outside of tables."""
    line = one_line(str(text))
    if line.strip() and not set("`|") & set(line):
        return Markdown(f"`{line}`")
    entities = re.sub(r"[\\`*_\[\]|~$:.]", lambda match: f"&#{ord(match[0])};", html.escape(line))
    return Markdown(f"<code>{entities}</code>")


def fence(text: object) -> Markdown:
    """A fenced code block whose fence is longer than any run of backticks in ``text``."""
    body = printable(str(text))
    longest = max((len(run) for run in re.findall("`+", body)), default=0)
    marks = "`" * max(3, longest + 1)
    return Markdown(f"{marks}text\n{body}\n{marks}")


def fixed(value: float | None, digits: int = 1, unit: str = "") -> Markdown:
    """A number with ``digits`` decimals and its unit, or a dash where there is none."""
    return Markdown(ABSENT if value is None else f"{value:.{digits}f}{unit}")


def signed(value: float | None, digits: int = 1, unit: str = "") -> Markdown:
    """A difference with its sign (a true minus), or a dash where there is none."""
    if value is None:
        return Markdown(ABSENT)
    text = f"{value:+.{digits}f}"
    if float(text) == 0:
        text = text[1:]
    return Markdown(text.replace("-", "−") + unit)


def count(value: int | None) -> Markdown:
    """An integer with its thousands marked, or a dash where there is none."""
    return Markdown(ABSENT if value is None else f"{value:,}")


def _finalize(value: Any) -> Any:
    if value is None:
        raise ValueError("a template prints a value that is None; pass it through `fixed` or decide in the model")
    return value if isinstance(value, jinja2.Undefined) else escape(value)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        autoescape=False,  # HTML rules are not markdown's; `finalize` escapes instead
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        raw=lambda text: Markdown(text), code=code, fence=fence, fixed=fixed, signed=signed, count=count
    )
    return environment


def render_template(name: str, **model: Any) -> str:
    """Render ``report_templates/NAME`` with ``model``; errors are Jinja's, naming template and line."""
    return _environment().get_template(name).render(**model)
