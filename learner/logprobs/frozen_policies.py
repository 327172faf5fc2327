"""Provides the frozen policies of a run (reference and teachers), the same ones after a resume.

Weights that came from a directory are read from it again. Weights that were the run's own policy are in its
checkpoints."""

from pathlib import Path

from transformers import PretrainedConfig

from bus.errors import ConfigError
from learner.algorithms.losses.objective import Objective
from learner.backends.contract.backend import Backend
from learner.backends.contract.frozen_policies import FrozenPolicies
from learner.backends.model_loading import load_hf_directory
from learner.config.frozen_policies import ReferenceConfig
from learner.config.learner import LearnerConfig
from learner.config.process_settings import LearnerSettings
from learner.model_directories.checkpoint_manifest import adapters_beside
from learner.model_directories.lazy_weights import State
from learner.model_directories.model_directory import other_tokens
from learner.progress.progress import Stage


def hold_frozen_policies(
    backend: Backend, settings: LearnerSettings, learner: LearnerConfig, *, stage: Stage, step: int
) -> None:
    """Load the frozen policies that `learner` wants and no checkpoint has brought; drop all others.

    Every rank calls this before the first step and again when reinforcement learning begins, since a
    reference without a directory is the policy at that moment. `stage` and `step` are those of the backend's
    weights.

    Raises `ConfigError` when a directory does not fit the policy, and when the policy that reinforcement
    learning began with is no longer there."""
    frozen = backend.frozen
    wanted = set(Objective.of(learner).frozen) - learner.served_teachers.keys()
    to_initial = stage == "warmup" and settings.warmup.steps > 0 and settings.warmup.loss.facts.to_reference
    if to_initial:
        wanted.add("reference")
    frozen.keep_only(wanted)
    reference = learner.reference
    for tag, teacher in learner.used_teachers.items():
        if teacher.path is not None and frozen.sources.get(tag) != teacher.path:
            _load(backend, settings, tag, teacher.path)
    # where adapters go on, the model that the run begins with lies in no directory
    initial = None if adapters_beside(settings.model_directory) else settings.model_directory
    source = reference.path or (None if settings.warmup.steps else initial)
    if to_initial:
        source = initial
    if "reference" not in wanted or _is_held(frozen, reference, source):
        return
    if source is not None:
        _load(backend, settings, "reference", source, is_initial=to_initial or reference.path is None)
    elif to_initial or (stage == "rl" and step == 0):
        frozen.hold("reference")
    elif stage != "warmup":
        raise ConfigError(
            f"learner.reference.kl_coef={reference.kl_coef} needs a reference, but step {step} was trained "
            "without one, or with a directory's, and the policy after the warm-up is gone: give a Hugging "
            "Face directory with --learner.reference.path"
        )


def refresh_reference(backend: Backend, learner: LearnerConfig, step: int) -> None:
    """Make the policy the reference if `step` is a multiple of `refresh_every`. Every rank calls this."""
    every = learner.reference.refresh_every
    if every is not None and step % every == 0:
        backend.frozen.hold("reference")


def _is_held(frozen: FrozenPolicies, reference: ReferenceConfig, source: Path | None) -> bool:
    """Return whether the reference that the configuration names is held. Without a `reference.path` it is an
    earlier policy of the run, or the weights read from `source`."""
    if "reference" in frozen.own:
        return reference.path is None or reference.refresh_every is not None
    return "reference" in frozen and frozen.sources["reference"] == source


def _load(
    backend: Backend, settings: LearnerSettings, tag: str, directory: Path, *, is_initial: bool = False
) -> None:
    hf_config, state = _opened(tag, directory, settings.model_directory)
    if different := backend.other_hyperparameters(hf_config):
        raise ConfigError(
            f"the {tag} in {directory} takes the policy's place in the model, so all of it must be the same, "
            f"but {', '.join(different)}: choose a model like the policy"
        )
    backend.frozen.load(tag, hf_config, state, directory, is_initial=is_initial)


def refuse_other_policies(settings: LearnerSettings, learner: LearnerConfig) -> None:
    """Raise `ConfigError` for a directory of a reference or a teacher that cannot be read, or whose tokens
    are not the policy's."""
    named = {tag: teacher.path for tag, teacher in learner.used_teachers.items()}
    for tag, directory in {**named, "reference": learner.reference.path}.items():
        if directory is not None:
            _opened(tag, directory, settings.model_directory)


def _opened(tag: str, directory: Path, model_directory: Path) -> tuple[PretrainedConfig, State]:
    found = load_hf_directory(directory)
    if other := other_tokens(directory, model_directory):
        raise ConfigError(
            f"the {tag} in {directory} has another vocabulary than the policy in {model_directory}: "
            f"{len(other)} tokens have other ids, as {other[0]!r}; choose a model with the policy's tokenizer"
        )
    return found
