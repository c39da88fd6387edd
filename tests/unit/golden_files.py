"""Whole rendered texts under test, in ``tests/unit/golden/``.

``REPRO_UPDATE_GOLDEN=1`` writes what was rendered instead of comparing, and skips the test; read the diff before
committing it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    """Fail with a diff if ``text`` is not the golden file ``name``."""
    path = GOLDEN / name
    if os.environ.get("REPRO_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        pytest.skip(f"wrote {path}")
    assert text == path.read_text(encoding="utf-8")
