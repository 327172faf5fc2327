"""Where the frozen policies of a run come from. They are the same after a resume.

What was read from a directory is read from it again; what was the run's own policy once lies in its
checkpoints.
"""

from pathlib import Path

from bus.errors import ConfigError
from learner.config import LearnerConfig
from learner.conversion.files import has_tokenizer, load_hf_directory, load_tokenizer
from learner.losses.select import Objective
from learner.manifest import differences
from learner.progress import Stage
from learner.settings import LearnerSettings
from learner.trainer import Trainer


def hold_frozen_policies(
    trainer: Trainer, settings: LearnerSettings, learner: LearnerConfig, *, stage: Stage, step: int
) -> None:
    """Hold what `learner` wants and no checkpoint has brought. Every rank calls this.

    To call before the first step and again when reinforcement learning begins: a reference without a
    directory is the policy of that moment. `stage` and `step` say where the trainer's weights stand.

    Raises `ConfigError` when a directory does not fit the policy, and when the policy that reinforcement
    learning began with is no longer there.
    """
    wanted = Objective.of(learner).frozen
    if "teacher" in wanted and "teacher" not in trainer.frozen and learner.teacher.path is not None:
        _load(trainer, settings, "teacher", learner.teacher.path)
    if "reference" in wanted and ("reference" not in trainer.frozen or _has_moved(trainer, learner)):
        source = learner.reference.path or (None if settings.warmup.steps else settings.model_directory)
        if source is not None:
            _load(trainer, settings, "reference", source)
        elif stage == "rl" and step == 0:
            trainer.frozen.hold("reference")
        elif stage != "warmup":
            raise ConfigError(
                f"learner.reference.kl_coef={learner.reference.kl_coef} needs a reference, but step {step} "
                "was trained without one, and the policy after the warm-up is gone: give a Hugging Face "
                "directory with --learner.reference.path"
            )


def refresh_reference(trainer: Trainer, learner: LearnerConfig, step: int) -> None:
    """Make the policy after `step` the reference, if it is time to. Every rank calls this after each step."""
    every = learner.reference.refresh_every
    if every is not None and step % every == 0:
        trainer.frozen.hold("reference")


def _has_moved(trainer: Trainer, learner: LearnerConfig) -> bool:
    """Whether a checkpoint brought the run's own policy, and the configuration now names a directory."""
    reference = learner.reference
    return (
        "reference" in trainer.frozen.own and reference.path is not None and reference.refresh_every is None
    )


def _load(trainer: Trainer, settings: LearnerSettings, tag: str, directory: Path) -> None:
    hf_config, state = load_hf_directory(directory)
    if different := differences(hf_config, trainer.hf_config):
        raise ConfigError(
            f"the {tag} in {directory} takes the policy's place in the model, so all of it must be the same, "
            f"but {', '.join(different)}: choose a model like the policy"
        )
    if directory != settings.model_directory and has_tokenizer(directory):
        ours, theirs = (load_tokenizer(path).get_vocab() for path in (settings.model_directory, directory))
        if other := {token for token, number in ours.items() if theirs.get(token) != number}:
            raise ConfigError(
                f"the {tag} in {directory} has another vocabulary than the policy in "
                f"{settings.model_directory}: {len(other)} tokens have other ids, as {min(other)!r}; choose "
                "a model with the policy's tokenizer"
            )
    trainer.frozen.load(tag, hf_config, state)
