"""What of a run's settings does not fit its model: asked before a start, and by the learner itself."""

import torch

from bus.errors import ConfigError
from learner.backends.contract.backend import CriticSource
from learner.backends.factory import (
    refuse_attention,
    refuse_batches,
    refuse_optimizers,
    refuse_quantisation,
    refuse_router_replay,
    refuse_state_directory,
)
from learner.backends.model_loading import load_hf_directory
from learner.backends.suitability import refuse_other_weights, refuse_untrainable
from learner.config.backend import refuse_other_world
from learner.config.parallel import ParallelConfig
from learner.config.process_settings import LearnerSettings
from learner.initial.initial import Initial
from learner.logprobs.frozen_policies import refuse_other_policies
from learner.model_directories.model_directory import other_tokens


def refuse_unfit(settings: LearnerSettings, initial: Initial, parallel: ParallelConfig) -> None:
    """Raise `ConfigError` for a model that the backend does not train as `parallel` divides it, for batches
    that cannot be trained on here and for weights that cannot be published as the run is to."""
    learner, hf_config = settings.learner, initial.hf_config
    refuse_untrainable(settings.model, learner.backend, hf_config, parallel)
    refuse_batches(settings.model, learner.batch, hf_config)
    refuse_attention(settings.model, parallel)
    refuse_state_directory(learner)
    stages = (learner, settings.warmup) if settings.warmup.steps else (learner,)
    refuse_optimizers(settings.model, [stage.optimizer for stage in stages], hf_config, learner.backend)
    refuse_router_replay(learner, hf_config)
    refuse_quantisation(learner, initial.state)


def refuse_before_start(settings: LearnerSettings, initial: Initial) -> None:
    """Do what `refuse_unfit` does, and refuse what each rank would find while it loads the weights: those of
    the policy, of frozen policies and of a critic, and a world of ranks that cannot be divided so."""
    world, learner = settings.learner.world, settings.learner
    refuse_unfit(settings, initial, learner.parallel)
    refuse_other_world(learner.parallel, world.processes * world.nodes, learner.backend)
    refuse_other_weights(
        settings.model_directory, initial.hf_config, initial.state, learner.backend, learner.mtp
    )
    refuse_other_policies(settings, learner)
    critic_source(settings, initial)
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and world.processes > gpus:
        raise ConfigError(
            f"learner.world.processes={world.processes} ranks on this host, which has {gpus} GPUs: set it to "
            f"{gpus} at most, or start ranks on several hosts (learner.world.nodes)"
        )


def critic_source(settings: LearnerSettings, initial: Initial) -> CriticSource | None:
    """Return where the critic comes from; None for a run without a critic. Raises `ConfigError` for a
    directory whose model has other tokens than the policy or a shorter context."""
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
