"""What a run is told that is started again: that it is over, or what is other than before."""

from collections.abc import Mapping

from bus.codec import Json
from launch.run_view.run_files import NOT_COMPARED, RunFiles
from launch.settings.run_config import RunConfig
from launch.settings.sources import by_name
from storage.disk.run_directory import RunDirectory

SHOWN = 12
"""Most settings that are named."""


def finished(config: RunConfig, run: RunDirectory) -> str | None:
    """Return what a start says of a run that has ended and has nothing left to do; None of others."""
    if not run.exists or not run.summary.exists() or (why := over(config, run)) is None:
        return None
    return f"Run {config.run!r} is complete: {why}. Another --run starts anew."


def over(config: RunConfig, run: RunDirectory) -> str | None:
    """Return why a run that has ended by itself has nothing left to do by these settings; None where it has.

    Raises `LostDataError` where a file of the run is garbled."""
    files = RunFiles(run.path)
    saved = files.progress or {}
    if saved.get("stage") != "done":
        return None
    step, target = int(str(saved.get("step", 0))), config.learner.target_accuracy
    if not config.learner.steps:
        return (
            f"it has trained {saved.get('warmup_step', 0)} steps on demonstrations: give prompts, a reward "
            "and --learner.steps to have reinforcement learning follow"
        )
    if step >= config.learner.steps:
        return f"it has trained {step} steps: give a higher --learner.steps to have it go on"
    reached = files.settings.get("learner.target_accuracy")
    if target is None or saved.get("target_reached_step") is None:
        return None
    if not isinstance(reached, float | int) or target > reached:
        return None
    return (
        f"it has reached its target of {reached:g} after {step} steps: give a higher "
        "--learner.target-accuracy, or none, to have it go on"
    )


def remarks(config: RunConfig, run: RunDirectory) -> list[str]:
    """Say where a run that was begun before goes on, and with which other settings than it had."""
    said = []
    files = RunFiles(run.path)
    saved = files.progress or {}
    if saved.get("stage") == "done":
        step, steps = saved.get("step"), config.learner.steps
        said.append(f"Run {config.run!r} had ended after step {step}, and goes on to step {steps}.")
    before, now = files.settings, by_name(config.model_dump(mode="json"))
    other = [
        f"{name}={_shown(now, name)} (it was {_shown(before, name)})"
        for name in dict.fromkeys([*before, *now])
        if before and name.partition(".")[0] not in NOT_COMPARED and before.get(name) != now.get(name)
    ]
    if other:
        more = f", and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
        said.append(f"Other settings than at the last start: {', '.join(other[:SHOWN])}{more}.")
    return said


def stage_of(run: RunDirectory) -> Json:
    """Return the stage in which the run's learner last ended; None where it never did."""
    return (RunFiles(run.path).progress or {}).get("stage")


def _shown(settings: Mapping[str, object], name: str) -> str:
    value = settings.get(name)
    return "none" if value is None else str(value)
