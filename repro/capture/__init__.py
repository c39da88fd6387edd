"""Spec -> capture on disk. ``capture_run`` captures what a run lacks; ``resolve_device`` chooses the device."""

from repro.capture.machine import resolve_device
from repro.capture.run import capture_run

__all__ = ["capture_run", "resolve_device"]
