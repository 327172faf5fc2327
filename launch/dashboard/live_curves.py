"""What a browser that watches a run has of its curves, so that it is sent no more than it lacks."""

from bus.codec import Json
from launch.dashboard.curve_feed import CurveFeed
from launch.dashboard.run_curves import RunCurves


class LiveCurves:
    """Remembers what was sent to one browser."""

    def __init__(self) -> None:
        self._seen: tuple[int, float, str] | None = None
        self._curves: RunCurves | None = None
        self._width = 0
        self._last = -1

    def news(self, feed: CurveFeed) -> dict[str, Json] | None:
        """Return what replaces the steps from its `from` on; None when nothing has changed.

        All of the curves are sent when earlier steps were undone, or when their intervals became longer."""
        seen = (feed.revision, round(feed.read_fraction, 2), feed.problem)
        if seen == self._seen:
            return None
        changed = self._seen is None or seen[0] != self._seen[0]
        self._seen = seen
        head: dict[str, Json] = {"read": seen[1], "problem": seen[2]}
        if not changed:
            return head
        steps = feed.curves.steps
        same = feed.curves is self._curves and steps.width == self._width and steps.last >= self._last
        begin = self._last // self._width * self._width if same and self._last >= 0 else 0
        self._curves, self._width, self._last = feed.curves, steps.width, steps.last
        return head | {"from": begin} | feed.curves.payload(begin=begin)
