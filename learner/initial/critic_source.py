"""Tells what a run's critic is made from: a directory of its own, or the policy that the run begins with."""

from bus.errors import ConfigError
from learner.backends.contract.backend import CriticSource
from learner.backends.model_loading import load_hf_directory
from learner.config.process_settings import LearnerSettings
from learner.initial.initial import Initial
from learner.model_directories.model_directory import other_tokens


def critic_source(settings: LearnerSettings, initial: Initial) -> CriticSource | None:
    """Return it; None for a run without a critic.

    Raises `ConfigError` for a directory whose model has other tokens than the policy or a shorter context."""
    config = settings.learner.critic
    if not settings.learner.has_critic:
        return None
    if config.path is None:
        return CriticSource(config=config, hf_config=initial.hf_config, state=initial.state)
    hf_config, state = load_hf_directory(config.path)
    for name in ("vocab_size", "max_position_embeddings"):
        ours, least = getattr(hf_config, name), getattr(initial.hf_config, name)
        if ours < least:
            raise ConfigError(
                f"learner.critic.path={config.path}: {name} is {ours}, and the policy's is {least}: choose a "
                "model that reads all that the policy writes"
            )
    if other := other_tokens(config.path, settings.model_directory):
        raise ConfigError(
            f"learner.critic.path={config.path} has another vocabulary than the policy in "
            f"{settings.model_directory}: {len(other)} tokens have other ids, as {other[0]!r}; choose a "
            "model with the policy's tokenizer"
        )
    return CriticSource(config=config, hf_config=hf_config, state=state)
