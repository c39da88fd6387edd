"""Escaping is the default, so a name from a profile cannot change the report's structure."""

from __future__ import annotations

import jinja2
import pytest

from repro.report import render
from repro.report.render import Markdown, code, count, escape, fence, fixed, signed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text 1.5", "plain text 1.5"),
        ("a|b", r"a\|b"),
        ("`x`", r"\`x\`"),
        ("<img src=x>", "&lt;img src=x&gt;"),
        ("&lt;", "&amp;lt;"),
        ("two\nlines\r\n## three", "two lines ## three"),
        ("# heading", r"\# heading"),
        ("1. item", r"1\. item"),
        ("- item", r"\- item"),
        ("[a](http://b)", r"\[a\](http\://b)"),
        ("HTTPS://b.c www.b.c Www.d a:b /c//d", r"HTTPS\://b.c www\.b.c Www\.d a:b /c//d"),
        ("copy_ms __init__", r"copy_ms \_\_init\_\_"),
        ("*x* ~y~ $z$ \\", r"\*x\* \~y\~ \$z\$ \\"),
        ("\x1b[31mred\x00", "�\\[31mred�"),
        ("right\u202eleft", "right�left"),
        ("bad \udcff byte", "bad � byte"),
        ("", ""),
    ],
)
def test_escape(text: str, expected: str) -> None:
    assert escape(text) == expected


def test_escape_leaves_markdown_alone_and_is_idempotent() -> None:
    assert escape(Markdown("**b**")) == "**b**"
    assert escape(escape("a|b")) == r"a\|b"


def test_code() -> None:
    assert code("py -u *x*") == "`py -u *x*`"
    assert code("a|b`c") == "<code>a&#124;b&#96;c</code>"
    assert code("") == "<code></code>"
    assert code("|http://a") == "<code>&#124;http&#58;//a</code>"
    assert code("<b>|") == "<code>&lt;b&gt;&#124;</code>"


def test_fence_is_longer_than_what_it_holds() -> None:
    assert fence("a\n```\n\x1bb") == "````text\na\n```\n�b\n````"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fixed(1.25, 1, "%"), "1.2%"),
        (fixed(0.0, 2), "0.00"),
        (fixed(None, 1, "%"), "—"),
        (signed(-1.25, 2, " ms"), "−1.25 ms"),
        (signed(3, 1), "+3.0"),
        (signed(-0.04, 1), "0.0"),
        (signed(None), "—"),
        (count(1234567), "1,234,567"),
        (count(None), "—"),
    ],
)
def test_numbers(text: str, expected: str) -> None:
    assert text == expected


def _render(source: str, **model: object) -> str:
    return render._environment().from_string(source).render(**model)


def test_templates_escape_unless_told() -> None:
    assert _render("{{ x }}|{{ x | raw }}|{{ x | code }}|{{ n }}", x="a*b", n=3) == r"a\*b|a*b|`a*b`|3"


def test_templates_refuse_undefined_and_none() -> None:
    with pytest.raises(jinja2.UndefinedError):
        _render("{{ missing }}")
    with pytest.raises(ValueError, match="None"):
        _render("{{ x }}", x=None)
