from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from repro.device.emulated_timeline import Engine, Operation, Timeline


def scheduled(*operations: Operation) -> list[tuple[int, int]]:
    """Submit all at 0 and return their (start, end)."""
    timeline = Timeline()
    for operation in operations:
        timeline.submit(operation, 0)
    timeline.advance(0)
    return [(operation.start_ns, operation.end_ns) for operation in operations]


def test_one_engine_does_one_operation_at_a_time_in_order_of_submission() -> None:
    first, second = Operation(Engine.COMPUTE, 10), Operation(Engine.COMPUTE, 5)
    assert scheduled(first, second) == [(0, 10), (10, 15)]


def test_engines_work_at_the_same_time() -> None:
    assert scheduled(*(Operation(engine, 10) for engine in Engine)) == [(0, 10)] * 3


def test_work_that_waits_holds_up_nobody_else_on_its_engine() -> None:
    copy = Operation(Engine.H2D, 100)
    waits = Operation(Engine.COMPUTE, 10, [copy])
    ready = Operation(Engine.COMPUTE, 30)
    assert scheduled(copy, waits, ready) == [(0, 100), (100, 110), (0, 30)]


def test_the_engine_does_not_stay_idle_for_work_that_is_not_ready() -> None:
    copy = Operation(Engine.H2D, 20)
    waits = Operation(Engine.COMPUTE, 10, [copy])
    long = Operation(Engine.COMPUTE, 30)
    assert scheduled(copy, waits, long) == [(0, 20), (30, 40), (0, 30)]


def test_kernels_of_two_streams_take_turns() -> None:
    a1 = Operation(Engine.COMPUTE, 10)
    a2 = Operation(Engine.COMPUTE, 10, [a1])
    b1 = Operation(Engine.COMPUTE, 10)
    b2 = Operation(Engine.COMPUTE, 10, [b1])
    assert scheduled(a1, a2, b1, b2) == [(0, 10), (20, 30), (10, 20), (30, 40)]


def test_what_started_is_final_and_what_has_not_is_a_forecast() -> None:
    timeline = Timeline()
    copy = Operation(Engine.H2D, 100)
    kernel = Operation(Engine.COMPUTE, 10, [copy])
    for operation in (copy, kernel):
        timeline.submit(operation, 0)
    timeline.advance(50)
    assert (copy.fixed, kernel.fixed) == (True, False)
    assert kernel.start_ns == 100
    late = Operation(Engine.COMPUTE, 80)
    timeline.submit(late, 50)
    timeline.advance(60)
    assert (late.start_ns, kernel.start_ns, copy.start_ns) == (50, 130, 0)


@dataclass(frozen=True)
class Step:
    engine: Engine
    duration_ns: int
    stream: int
    pause_ns: int
    """Between the submission before and this one."""
    waits_for: tuple[int, ...]
    """How many operations back the events lie that its stream waits for."""
    advance: bool
    """Whether the host looks at the schedule before it."""


steps = st.lists(
    st.builds(
        Step,
        engine=st.sampled_from(Engine),
        duration_ns=st.integers(1, 20),
        stream=st.integers(0, 3),
        pause_ns=st.integers(0, 12),
        waits_for=st.lists(st.integers(1, 8), max_size=2).map(tuple),
        advance=st.booleans(),
    ),
    min_size=1,
    max_size=30,
)


def run(program: list[Step]) -> list[Operation]:
    timeline = Timeline()
    operations: list[Operation] = []
    tails: dict[int, Operation] = {}
    now_ns = 0
    for step in program:
        now_ns += step.pause_ns
        if step.advance:
            timeline.advance(now_ns)
        after = [operations[-back] for back in step.waits_for if back <= len(operations)]
        if step.stream in tails:
            after.append(tails[step.stream])
        operation = Operation(step.engine, step.duration_ns, after, stream_id=step.stream)
        timeline.submit(operation, now_ns)
        tails[step.stream] = operation
        operations.append(operation)
    timeline.advance(10**9)
    return operations


def ready_ns(operation: Operation) -> int:
    return max([operation.submitted_ns, *(earlier.end_ns for earlier in operation.after)])


@settings(max_examples=120, deadline=None)
@given(steps)
def test_any_program_obeys_the_device(program: list[Step]) -> None:
    operations = run(program)
    for operation in operations:
        assert operation.fixed
        assert operation.end_ns - operation.start_ns == operation.duration_ns
        # Stream and event order, and nothing before its submission.
        assert operation.start_ns >= ready_ns(operation)
    ready = {operation: ready_ns(operation) for operation in operations}
    for engine in Engine:
        queue = sorted((op for op in operations if op.engine is engine), key=lambda op: op.start_ns)
        previous_end_ns = 0
        for position, operation in enumerate(queue):
            # One at a time; and never idle while this one was ready (work-conserving).
            assert operation.start_ns == max(previous_end_ns, ready[operation])
            # First ready, first served, ties in order of submission.
            for later in queue[position + 1 :]:
                if ready[later] <= operation.start_ns:
                    assert (ready[operation], operation.number) < (ready[later], later.number)
            previous_end_ns = operation.end_ns


@settings(max_examples=100, deadline=None)
@given(steps)
def test_looking_at_the_schedule_does_not_change_it(program: list[Step]) -> None:
    def times(look: bool) -> list[tuple[int, int]]:
        looked = [Step(**{**vars(step), "advance": look}) for step in program]
        return [(operation.start_ns, operation.end_ns) for operation in run(looked)]

    assert times(look=True) == times(look=False)
