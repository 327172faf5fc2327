"""What a run is told that is started again: that it is over, or what is other than before."""

from bus.codec import Json
from launch.run_view.run_files import RunFiles, changed_settings, told_changes
from launch.settings.run_config import RunConfig
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
    taught = int(str(saved.get("warmup_step", 0)))
    if not config.learner.steps and config.warmup.steps > taught:
        begin = f"--model.path {run.export}" if config.learner.lora.exists else f"--from {config.run}"
        return (
            f"it has trained {taught} steps on demonstrations, and is not extended to {config.warmup.steps}: "
            f"`launch local {begin}` begins another run with its weights"
        )
    if config.warmup.loss.facts.of_scores:
        return f"it has trained {taught} steps on pairs: {run.export} has the reward model"
    if not config.learner.steps:
        return (
            f"it has trained {taught} steps on demonstrations: give prompts, a reward and --learner.steps to "
            "have reinforcement learning follow"
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
    """Say where a run that was begun before goes on, and which of its settings have changed."""
    said = []
    files = RunFiles(run.path)
    saved = files.progress or {}
    if saved.get("stage") == "done":
        step, steps = saved.get("step"), config.learner.steps
        said.append(f"Run {config.run!r} had ended after step {step}, and goes on to step {steps}.")
    changes = told_changes(changed_settings(files.settings, config))
    if changes:
        more = (
            [f"and {len(changes) - SHOWN} more, which `launch runs show` names"]
            if len(changes) > SHOWN
            else []
        )
        said.append(
            "\n  ".join(["Settings that have changed since the last start:", *changes[:SHOWN], *more])
        )
    return said


def stage_of(run: RunDirectory) -> Json:
    """Return the stage in which the run's learner last ended; None where it never did."""
    return (RunFiles(run.path).progress or {}).get("stage")
