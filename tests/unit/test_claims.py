"""Verdicts on hand-made figures: clear, tied, disagreeing, contradicting, lacking."""

from __future__ import annotations

import pytest
from report_models import analysis

from repro.analysis.claims import Claim, all_reproduced, judge
from repro.analysis.model import Analysis

FOUR = {"inline": 61.7, "pinned": 47.3, "split": 40.0, "overlap": 29.2}


def _judge(idle: dict[str, list[float]], **changes: dict[str, float]) -> dict[str, Claim]:
    """Claims by name; ``idle``: profile -> device idle a repeat."""
    analyses = {
        name: {
            repeat: analysis(name, idle_pct=pct, **changes.get(name, {})) for repeat, pct in enumerate(values, start=1)
        }
        for name, values in idle.items()
    }
    return {claim.name: claim for claim in judge(analyses, {"final_staged": "needs the patch pinned-staging"})}


def _four(**changes: float) -> dict[str, list[float]]:
    return {name: [pct] for name, pct in (FOUR | changes).items()}


def test_published_order_reproduces_the_three_claims() -> None:
    claims = _judge(_four(), overlap={"h2d_overlapped_pct": 31.3})
    verdicts = {name: claim.verdict for name, claim in claims.items()}
    assert verdicts == {
        "prep-as-operator": "reproduced",
        "naive-pinning": "reproduced",
        "threads-and-streams": "reproduced",
        "pinned-staging": "not run",
    }
    assert claims["prep-as-operator"].reason == (
        "device idle, inline − split: +21.7 points (one pair, no spread known); "
        "every pair points the claimed way, 1.0 points needed"
    )
    assert claims["pinned-staging"].reason == "final_split: not captured; final_staged: needs the patch pinned-staging"
    assert all_reproduced(list(claims.values()))


@pytest.mark.parametrize(
    ("inline", "verdict"),
    [
        ([41.0], "reproduced"),  # exactly the least effect
        ([40.9], "inconclusive"),
        ([40.0], "inconclusive"),
        ([39.1], "inconclusive"),
        ([39.0], "not reproduced"),
        ([50.0, 45.0, 42.0], "reproduced"),
        ([50.0, 45.0, 40.5], "reproduced"),  # one pair is small, but none points the other way
        ([50.0, 45.0, 39.9], "inconclusive"),
        ([50.0, 45.0, 40.0], "inconclusive"),  # a tie is not the claimed way
        ([40.2, 40.5, 40.9], "inconclusive"),
        ([30.0, 35.0, 39.9], "not reproduced"),
    ],
)
def test_cut_needs_every_pair_and_a_median(inline: list[float], verdict: str) -> None:
    claim = _judge({"inline": inline, "split": [40.0] * len(inline)})["prep-as-operator"]
    assert claim.verdict == verdict
    assert all_reproduced([claim]) == (verdict == "reproduced")


@pytest.mark.parametrize(
    ("pinned", "verdict"),
    [
        ([47.0], "reproduced"),
        ([40.0], "reproduced"),  # no better is not helping
        ([39.0], "reproduced"),  # exactly the tolerance
        ([38.9], "not reproduced"),
        ([47.0, 38.9], "inconclusive"),
        ([38.0, 30.0], "not reproduced"),
    ],
)
def test_does_not_help_has_a_tolerance(pinned: list[float], verdict: str) -> None:
    assert _judge({"pinned": pinned, "split": [40.0] * len(pinned)})["naive-pinning"].verdict == verdict


def test_pairs_are_taken_within_a_repeat() -> None:
    """Both profiles drift by 20 points from repeat to repeat; the difference does not."""
    claim = _judge({"inline": [50.0, 60.0, 70.0], "split": [45.0, 55.0, 65.0]})["prep-as-operator"]
    assert [pair.effect for pair in claim.checks[0].pairs] == [5.0, 5.0, 5.0]
    assert claim.verdict == "reproduced"


def test_threads_need_overlap_and_the_lowest_idle() -> None:
    assert _judge(_four(), overlap={"h2d_overlapped_pct": 4.9})["threads-and-streams"].verdict == "inconclusive"
    assert _judge(_four())["threads-and-streams"].verdict == "inconclusive"
    overlapping = {"h2d_overlapped_pct": 31.3}
    claim = _judge(_four(overlap=44.0), overlap=overlapping)["threads-and-streams"]
    assert claim.verdict == "not reproduced"
    assert claim.reason.startswith("device idle, lowest of the other three − overlap: −4.0 points")
    assert _judge(_four(overlap=39.5), overlap=overlapping)["threads-and-streams"].verdict == "inconclusive"


def test_no_h2d_at_all_is_inconclusive() -> None:
    claim = _judge(_four(), overlap={"h2d_overlapped_pct": None})["threads-and-streams"]
    assert claim.verdict == "inconclusive"
    assert "no repeat has every figure it needs" in claim.reason


def _final(before_ms: float, after_ms: float, *, idle_after: float = 54.8) -> Claim:
    analyses: dict[str, dict[int, Analysis]] = {
        "final_split": {1: analysis("final_split", idle_pct=62.4, copy_ms=before_ms)},
        "final_staged": {1: analysis("final_staged", idle_pct=idle_after, copy_ms=after_ms)},
    }
    return next(claim for claim in judge(analyses, {}) if claim.name == "pinned-staging")


def test_staging() -> None:
    claim = _final(830.3, 155.1)
    assert claim.verdict == "reproduced"
    assert claim.checks[0].median_effect == pytest.approx(81.32, abs=0.01)
    assert _final(830.3, 900.0).verdict == "inconclusive"  # 8% more
    assert _final(830.3, 1000.0).verdict == "not reproduced"
    assert _final(0.0, 0.0).verdict == "inconclusive"  # nothing to cut


def test_copying_that_only_moved_is_not_reproduced() -> None:
    claim = _final(830.3, 155.1, idle_after=70.0)
    assert claim.verdict == "not reproduced"
    assert claim.reason.startswith("device idle, final_split − final_staged: −7.6 points")


def test_only_common_repeats_make_pairs() -> None:
    analyses = {
        "inline": {1: analysis("inline", idle_pct=60.0), 3: analysis("inline", idle_pct=62.0)},
        "split": {2: analysis("split", idle_pct=30.0), 3: analysis("split", idle_pct=40.0)},
    }
    claim = judge(analyses, {})[0]
    assert [pair.repeat for pair in claim.checks[0].pairs] == [3]
    assert claim.checks[0].pairs[0].measured == "inline 62.0%, split 40.0%"
