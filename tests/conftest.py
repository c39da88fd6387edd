"""Real parts (torch, nsys, docker, a compiler, a GPU): a test names what it needs with ``@pytest.mark.needs``.

Where the part is missing the test skips and says why; where ``REPRO_REQUIRE`` names it (CI) the test fails instead.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess

import hypothesis
import pytest

QUICK_EXAMPLES = 30
"""Of a property test that names no number, at a developer's; CI, which sets REPRO_REQUIRE, draws Hypothesis's 100."""


def pytest_configure() -> None:
    """Set how many examples are drawn.

    Take back an interrupt that a shell ignored for its background job: tests send it, and processes inherit that.
    """
    if not os.environ.get("REPRO_REQUIRE"):
        hypothesis.settings.register_profile("quick", max_examples=QUICK_EXAMPLES)
        hypothesis.settings.load_profile("quick")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _missing(part: str) -> str | None:
    """Why ``part`` cannot be used here, or None if it can."""
    if part == "torch":
        return None if importlib.util.find_spec("torch") else "torch is not installed"
    if part == "nsys":
        return None if shutil.which("nsys") else "no nsys on PATH (docker/install-nsight installs one)"
    if part == "g++":
        return None if shutil.which("g++") else "no g++ on PATH"
    if part == "docker":
        if not shutil.which("docker"):
            return "no docker on PATH"
        probe = subprocess.run(["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True)
        return None if probe.returncode == 0 else f"no Docker engine answers: {probe.stderr.strip()}"
    if part == "gpu":
        if not importlib.util.find_spec("torch"):
            return "torch is not installed"
        import torch

        return None if torch.cuda.is_available() else "torch finds no CUDA device"
    raise ValueError(f"unknown part {part!r}")


_cache: dict[str, str | None] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    required = set(filter(None, os.environ.get("REPRO_REQUIRE", "").split(",")))
    for mark in item.iter_markers("needs"):
        for part in mark.args:
            if part not in _cache:
                _cache[part] = _missing(part)
            reason = _cache[part]
            if reason and part in required:
                pytest.fail(f"REPRO_REQUIRE names {part}, but: {reason}", pytrace=False)
            if reason:
                pytest.skip(reason)
