"""Text that comes from a profile, a log or a host is data: make it safe to print."""

from __future__ import annotations

import re

# C0 and C1 controls, line and paragraph separators, bidirectional overrides, surrogates of undecodable bytes.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BLANKS = re.compile("[\t\n\r\x0b\x0c\x85\u2028\u2029]+")


def one_line(text: str, limit: int | None = None) -> str:
    """``text`` on one line: line breaks and tabs become a space, every other unprintable character U+FFFD.

    One of more than ``limit`` characters ends in an ellipsis there.
    """
    line = _UNPRINTABLE.sub("\ufffd", _BLANKS.sub(" ", text))
    return line if limit is None or len(line) <= limit else f"{line[: limit - 1]}…"


def printable(text: str) -> str:
    """``text`` with its line breaks kept and every other unprintable character as U+FFFD."""
    return "\n".join(_UNPRINTABLE.sub("\ufffd", line.expandtabs(4)) for line in text.splitlines())
