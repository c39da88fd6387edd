"""Arrays of a profile in, metrics and claims out. Nothing here draws."""

from repro.analysis.metrics import analyze
from repro.analysis.model import Analysis

__all__ = ["Analysis", "analyze"]
