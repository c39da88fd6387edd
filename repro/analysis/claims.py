"""The published claims, judged on paired differences: repeat N of one profile against repeat N of another.

A check computes one *effect* a pair, positive in the claimed direction, and needs ``least`` of it:

- *reproduced*: every pair points the claimed way and the median effect is at least ``least``;
- *not reproduced*: every pair points the other way and the median is at most -``least``;
- *inconclusive*: anything else, that is the pairs disagree or the difference is too small to tell from none.

"Does not help" is the opposite shape: ``least`` is negative, the effect may fall that far below zero (the tolerance).
It is reproduced if no pair falls below, not reproduced if all do, inconclusive if they disagree.
A claim is as good as its weakest check. One that lacks a profile is *not run* and says which and why.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from repro.analysis.model import Analysis

Verdict = Literal["reproduced", "not reproduced", "inconclusive", "not run"]
Repeats = Mapping[int, Analysis]
"""Repeat -> analysis, of one profile."""

IDLE_POINTS: Final = 1.0
"""Device idle: percentage points below which two captures are not told apart."""
PACED_IDLE_POINTS: Final = 3.0
"""The same for the final pair. Its source sets the pace, and at either end of the window of 3.3 s a batch may wait for
two of Ray Data's looks at its tasks, 100 ms each: six captures of each on two cores lay between 59.8 and 62.5%."""
OVERLAP_POINTS: Final = 5.0
"""Share of H2D time overlapped by kernels: percentage points that count as overlapping."""
COPY_CUT_PCT: Final = 10.0
"""copy_ms: percent of it that has to go."""

_WEAKEST_FIRST: Final[tuple[Verdict, ...]] = ("not run", "not reproduced", "inconclusive", "reproduced")


@dataclass(frozen=True)
class Pair:
    """One repeat: what was compared and the effect (positive in the claimed direction)."""

    repeat: int
    measured: str
    effect: float


@dataclass(frozen=True)
class Check:
    """One comparison of a claim. ``rule`` says what it takes, ``reason`` what decided."""

    what: str
    unit: str
    rule: str
    pairs: tuple[Pair, ...]
    median_effect: float | None
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Claim:
    """A published claim with its verdict. ``published`` is what the card's numbers say of it."""

    name: str
    text: str
    published: str
    needs: tuple[str, ...]
    checks: tuple[Check, ...]
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class _Rule:
    """How a check gets its effect from one analysis a profile; ``None`` from ``effect`` means not defined there."""

    what: str
    unit: str
    least: float
    needs: tuple[str, ...]
    effect: Callable[[Mapping[str, Analysis]], float | None]
    measured: Callable[[Mapping[str, Analysis]], str]


def _idle_line(*names: str) -> Callable[[Mapping[str, Analysis]], str]:
    return lambda of: ", ".join(f"{name} {of[name].idle_pct:.1f}%" for name in names)


def _overlap_gained(of: Mapping[str, Analysis]) -> float | None:
    threads, one_stream = of["overlap"].h2d.overlapped_pct, of["split"].h2d.overlapped_pct
    return None if threads is None or one_stream is None else threads - one_stream


def _copy_cut_pct(of: Mapping[str, Analysis]) -> float | None:
    before = of["final_split"].copy_ns
    return 100 * (before - of["final_staged"].copy_ns) / before if before else None


_OTHERS: Final = ("inline", "split", "pinned")

_CLAIMS: Final[tuple[tuple[str, str, str, tuple[_Rule, ...]], ...]] = (
    (
        "prep-as-operator",
        "Preparation as a CPU operator cuts device idle",
        "59.0% → 29.1%",
        (
            _Rule(
                "device idle, inline − split",
                "points",
                IDLE_POINTS,
                ("inline", "split"),
                lambda of: of["inline"].idle_pct - of["split"].idle_pct,
                _idle_line("inline", "split"),
            ),
        ),
    ),
    (
        "naive-pinning",
        "Naive pinning in the UDF does not help",
        "29.1% → 31.4%",
        (
            _Rule(
                "device idle, pinned − split",
                "points",
                -IDLE_POINTS,
                ("split", "pinned"),
                lambda of: of["pinned"].idle_pct - of["split"].idle_pct,
                _idle_line("split", "pinned"),
            ),
        ),
    ),
    (
        "threads-and-streams",
        "Threads with a stream each overlap H2D with compute and give the lowest device idle of the four",
        "24.7%, 31.3% of H2D overlapped",
        (
            _Rule(
                "H2D time overlapped by kernels, overlap − split",
                "points",
                OVERLAP_POINTS,
                ("split", "overlap"),
                _overlap_gained,
                lambda of: ", ".join(f"{name} {of[name].h2d.overlapped_pct:.1f}%" for name in ("split", "overlap")),
            ),
            _Rule(
                "device idle, lowest of the other three − overlap",
                "points",
                IDLE_POINTS,
                (*_OTHERS, "overlap"),
                lambda of: min(of[name].idle_pct for name in _OTHERS) - of["overlap"].idle_pct,
                _idle_line(*_OTHERS, "overlap"),
            ),
        ),
    ),
    (
        "pinned-staging",
        "Pinned staging cuts copy_ms, and device idle does not rise for it",
        "830.3 ms → 155.1 ms, device idle 62.4% → 54.8%",
        (
            _Rule(
                "copy_ms, cut from final_split to final_staged",
                "%",
                COPY_CUT_PCT,
                ("final_split", "final_staged"),
                _copy_cut_pct,
                lambda of: ", ".join(f"{name} {of[name].copy_ms:.1f} ms" for name in ("final_split", "final_staged")),
            ),
            _Rule(
                "device idle, final_split − final_staged",
                "points",
                -PACED_IDLE_POINTS,
                ("final_split", "final_staged"),
                lambda of: of["final_split"].idle_pct - of["final_staged"].idle_pct,
                _idle_line("final_split", "final_staged"),
            ),
        ),
    ),
)


def judge(analyses: Mapping[str, Repeats], missing: Mapping[str, str]) -> list[Claim]:
    """The four claims. ``analyses``: profile -> repeat -> analysis; ``missing``: profile -> why it has none."""
    return [_claim(*claim, analyses, missing) for claim in _CLAIMS]


def all_reproduced(claims: list[Claim]) -> bool:
    """True if every claim that could be run reproduced."""
    return all(claim.verdict in ("reproduced", "not run") for claim in claims)


def _claim(
    name: str,
    text: str,
    published: str,
    rules: tuple[_Rule, ...],
    analyses: Mapping[str, Repeats],
    missing: Mapping[str, str],
) -> Claim:
    needs = tuple(dict.fromkeys(profile for rule in rules for profile in rule.needs))
    lacking = [profile for profile in needs if not analyses.get(profile)]
    if lacking:
        reason = "; ".join(f"{profile}: {missing.get(profile, 'not captured')}" for profile in lacking)
        return Claim(name, text, published, needs, (), "not run", reason)
    checks = tuple(_check(rule, analyses) for rule in rules)
    weakest = min(checks, key=lambda check: _WEAKEST_FIRST.index(check.verdict))
    reason = "; ".join(check.reason for check in checks if check.verdict == weakest.verdict)
    return Claim(name, text, published, needs, checks, weakest.verdict, reason)


def _check(rule: _Rule, analyses: Mapping[str, Repeats]) -> Check:
    repeats = sorted(set.intersection(*(set(analyses[name]) for name in rule.needs)))
    pairs = []
    for repeat in repeats:
        of = {name: analyses[name][repeat] for name in rule.needs}
        effect = rule.effect(of)
        if effect is not None:
            pairs.append(Pair(repeat, rule.measured(of), effect))
    median = statistics.median(pair.effect for pair in pairs) if pairs else None
    verdict, reason = _verdict(rule, [pair.effect for pair in pairs])
    return Check(rule.what, rule.unit, _rule_text(rule), tuple(pairs), median, verdict, reason)


def _amount(value: float, rule: _Rule, sign: str = "+") -> str:
    """``value`` in the unit of ``rule``, with a true minus."""
    unit = "%" if rule.unit == "%" else f" {rule.unit}"
    return f"{value:{sign}.1f}{unit}".replace("-", "−")


def _rule_text(rule: _Rule) -> str:
    if rule.least < 0:
        return f"no pair below {_amount(rule.least, rule)} (tolerance)"
    return f"every pair above 0, median at least {_amount(rule.least, rule, '')}"


def _verdict(rule: _Rule, effects: list[float]) -> tuple[Verdict, str]:
    if not effects:
        return "inconclusive", f"{rule.what}: no repeat has every figure it needs"
    median = statistics.median(effects)
    spread = "one pair, no spread known"
    if len(effects) > 1:
        low, high = _amount(min(effects), rule), _amount(max(effects), rule)
        spread = f"median of {len(effects)} pairs, {low} to {high}"
    verdict, why = _tolerated(rule, effects) if rule.least < 0 else _clear(rule, effects, median)
    return verdict, f"{rule.what}: {_amount(median, rule)} ({spread}); {why}"


def _tolerated(rule: _Rule, effects: list[float]) -> tuple[Verdict, str]:
    limit = f"the tolerance of {_amount(rule.least, rule)}"
    if all(effect >= rule.least for effect in effects):
        return "reproduced", f"no pair is below {limit}"
    if all(effect < rule.least for effect in effects):
        return "not reproduced", f"every pair is below {limit}"
    return "inconclusive", f"some pairs are below {limit}, some are not"


def _clear(rule: _Rule, effects: list[float], median: float) -> tuple[Verdict, str]:
    least = _amount(rule.least, rule, "")
    if min(effects) <= 0 <= max(effects):
        return "inconclusive", "the pairs disagree" if len(effects) > 1 else "no difference"
    if abs(median) < rule.least:
        return "inconclusive", f"too small to tell from none, {least} needed"
    if median > 0:
        return "reproduced", f"every pair points the claimed way, {least} needed"
    return "not reproduced", "every pair points the other way"
