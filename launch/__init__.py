"""Starts and watches runs from a program or a notebook: docs/python.md. The names are loaded when they are
first used, so that `import launch` is quick and loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bus.errors import BusAwayError, ConfigError, LostDataError, SluiceError
    from bus.trajectory import Trajectory, Turn
    from launch.api.run import Result, Run, Stream
    from launch.api.start import attach, start
    from launch.run_view.history import Evaluation, Step
    from launch.run_view.recorded_runs import RecordedRun

__all__ = [
    "BusAwayError", "ConfigError", "Evaluation", "LostDataError", "RecordedRun", "Result", "Run",
    "SluiceError", "Step", "Stream", "Trajectory", "Turn", "attach", "start",
]  # fmt: skip
_MODULES = {
    "BusAwayError": "bus.errors",
    "ConfigError": "bus.errors",
    "Evaluation": "launch.run_view.history",
    "LostDataError": "bus.errors",
    "RecordedRun": "launch.run_view.recorded_runs",
    "Result": "launch.api.run",
    "Run": "launch.api.run",
    "SluiceError": "bus.errors",
    "Step": "launch.run_view.history",
    "Stream": "launch.api.run",
    "Trajectory": "bus.trajectory",
    "Turn": "bus.trajectory",
    "attach": "launch.api.start",
    "start": "launch.api.start",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
