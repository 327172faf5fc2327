"""The parts of a trajectory: its turns, and what lies between them."""

from collections.abc import Iterator

from bus.trajectory import Trajectory


def spans(t: Trajectory) -> Iterator[tuple[int, int, int | None]]:
    """Yield the parts of a trajectory as tokens [start, stop), with the number of the turn, if it is one."""
    end = 0
    for number, turn in enumerate(t.turns):
        if turn.start > end:
            yield end, turn.start, None
        yield turn.start, turn.stop, number
        end = turn.stop
    if len(t.token_ids) > end:
        yield end, len(t.token_ids), None
