"""The best checkpoint as screens show it."""

from bus.codec import Json
from launch.watch.units import fraction
from storage.metrics.records import integer, number


def best_text(best: Json) -> str:
    """Return what the learner says of its best checkpoint, for a human; empty if it names none."""
    if not isinstance(best, dict):
        return ""
    value, version, step = number(best, "value"), integer(best, "policy_version"), integer(best, "step")
    return f"{fraction(value)} {best.get('metric')} at v{version}, checkpoint of step {step}"
