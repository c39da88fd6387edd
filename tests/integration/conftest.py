"""What commands of the kit are started with, so that nothing they leave behind outlives their test."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_processes import marked

from repro.procs import OWNER_VARIABLE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """The environment of a kit that is run from a checkout; its processes have a mark of the test's own."""
    mark = f"{os.getpid()}:test-{secrets.token_hex(4)}"
    yield {**os.environ, OWNER_VARIABLE: mark, "PYTHONPATH": str(ROOT)}
    for process in marked(mark):
        process.kill()
