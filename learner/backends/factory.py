"""Tells which backend trains: only this module, suitability.py and model_loading.py import a
backend from outside."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import PretrainedConfig

from bus.errors import ConfigError
from learner.backends.contract.backend import Backend, CriticSource
from learner.backends.megatron.conversion.families import family_of, shape_of
from learner.backends.megatron.core import process_groups
from learner.backends.megatron.model.attention.windows import (
    refuse_shared_sinks,
    refuse_shared_states,
    refuse_shared_window,
    shortest_window,
)
from learner.backends.megatron.optimizer.muon import refuse_fused_matrices
from learner.backends.megatron.optimizer.state_file import StateFile
from learner.backends.megatron.trainer import Trainer
from learner.backends.quantised.rounding import Rounding
from learner.backends.sglang_kernels.kernels import load_kernels
from learner.backends.shared.trainable import TrainableWeights
from learner.config.backend import BackendName
from learner.config.batch import BatchConfig
from learner.config.learner import LearnerConfig
from learner.config.lora import NO_LORA, LoraConfig
from learner.config.model import ModelConfig
from learner.config.mtp import NO_MTP, MtpConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig, WorldConfig
from learner.distributed.process_group import init_process_group
from learner.model_directories.dtypes import compute_dtype, published_dtype
from learner.model_directories.lazy_weights import State, spec_of
from storage.images.reader import ImageReader
from storage.weights.quantisation import FORMATS, refuse_unsuitable


def _fsdp() -> Callable[..., Backend]:
    from learner.backends.fsdp.trainer import FsdpTrainer  # imports internals of transformers

    return FsdpTrainer


BACKENDS: dict[BackendName, Callable[[], Callable[..., Backend]]] = {
    "megatron": lambda: Trainer,
    "fsdp": _fsdp,
}
"""Each returns a class, imported where it trains and nowhere else, which takes (hf_config, state, optimizer,
dtype=, parallel=, trainable=, critic=, lora=, exact=), images= if it trains on images, and mtp= if it trains
a head for the token after the next."""


def init_world(
    parallel: ParallelConfig = UNDIVIDED, timeout_s: float = WorldConfig().collective_timeout_s, *,
    backend: BackendName = "megatron",
) -> None:  # fmt: skip
    """Join the world that torchrun describes in the environment, divided as `parallel` says.

    `timeout_s` bounds each collective. Raises `ConfigError` when the world cannot be divided so, before it
    waits for anybody."""
    if backend == "megatron":
        process_groups.init_world(parallel, timeout_s)
    else:  # nothing is divided
        init_process_group(timeout_s)


def close_world() -> None:
    """Leave the world; `init_world` may be called again."""
    process_groups.close_world()


def refuse_batches(model: ModelConfig, batch: BatchConfig, hf_config: PretrainedConfig) -> None:
    """Raise `ConfigError` for batches that no backend of this model can train on, on this machine."""
    if batch.share_prefixes and compute_dtype(model) == torch.float32 and torch.cuda.is_available():
        raise ConfigError(
            "learner.batch.share_prefixes=true has no attention kernel for model.dtype=float32 on a GPU: set "
            "model.dtype=bfloat16, or share_prefixes=false"
        )
    if batch.share_prefixes:
        refuse_shared_sinks(family_of(hf_config).sinks)
        refuse_shared_states(family_of(hf_config).delta is not None)
        refuse_shared_window(shortest_window(hf_config), hf_config.max_position_embeddings)


def refuse_attention(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise `ConfigError` for attention over context ranks that has no kernel on this machine."""
    if (
        parallel.context_attention == "ring"
        and compute_dtype(model) == torch.float32
        and torch.cuda.is_available()
    ):
        raise ConfigError(
            "learner.parallel.context_attention=ring has no attention kernel for model.dtype=float32 on a "
            "GPU: set model.dtype=bfloat16, or context_attention=gather"
        )


def refuse_state_directory(learner: LearnerConfig) -> None:
    """Raise `ConfigError` for a directory that takes no optimizer state: the warm-up may have none there."""
    if learner.optimizer.offload_directory is not None:
        StateFile(learner.optimizer.offload_directory, 1)  # the file is gone when nobody has it


def refuse_optimizers(
    model: ModelConfig, optimizers: Iterable[OptimizerConfig], hf_config: PretrainedConfig,
    backend: BackendName,
) -> None:  # fmt: skip
    """Raise `ConfigError` where one of the stages' optimizers is Muon, and the backend cannot tell the
    matrices of the model apart."""
    if all(optimizer.matrices == "adamw" for optimizer in optimizers):
        return
    if backend == "fsdp":
        from learner.backends.fsdp import matrices  # like the trainer above

        matrices.refuse_fused_matrices(hf_config, _trainable(model))
    else:
        refuse_fused_matrices(hf_config)


def refuse_router_replay(learner: LearnerConfig, hf_config: PretrainedConfig) -> None:
    """Raise `ConfigError` for router replay of a model without experts, or without routers that the backend
    knows."""
    if learner.router_replay != "none" and learner.backend == "fsdp":
        from learner.backends.fsdp.router_replay import refuse_unknown_routers  # like the trainer above

        refuse_unknown_routers(learner.router_replay, hf_config)
    elif learner.router_replay != "none" and shape_of(hf_config).experts is None:
        raise ConfigError(
            f"learner.router_replay={learner.router_replay}: the model, a {hf_config.model_type}, has no "
            "experts: set it to none"
        )


def refuse_quantisation(learner: LearnerConfig, state: State) -> None:
    """Raise `ConfigError` for weights, those of `state`, of which engines cannot have codes."""
    if learner.publication.quantisation != "none":
        shapes = {name: spec_of(state, name).shape for name in state}
        refuse_unsuitable(FORMATS[learner.publication.quantisation], shapes)


def build_backend(  # noqa: PLR0913  # what every backend is given, and the images
    model: ModelConfig, hf_config: PretrainedConfig, state: State, optimizer: OptimizerConfig,
    parallel: ParallelConfig, critic: CriticSource | None = None, *, backend: BackendName = "megatron",
    lora: LoraConfig = NO_LORA, mtp: MtpConfig = NO_MTP, images: ImageReader | None = None,
) -> Backend:  # fmt: skip
    """Return the backend with a model that has the weights `state`, in the world that `init_world`
    divided; with `critic`, it has a critic, with `lora` it trains adapters, and with `mtp` the head for the
    token after the next. `images` are those of a vision-language model. Raises `ConfigError` for a backend
    that does not train one, and for a model without such a head."""
    if images is not None and backend != "fsdp":
        raise ConfigError(
            f"learner.backend={backend} trains text models alone, and the model, a {hf_config.model_type}, "
            'is a vision-language model: set learner.backend = "fsdp" (docs/vision.md)'
        )
    given: dict[str, Any] = {} if images is None else {"images": images}
    if model.numerics == "sglang":
        if backend != "fsdp":
            raise ConfigError(
                f"model.numerics=sglang with learner.backend={backend}: set learner.backend=fsdp"
            )
        given["kernels"] = load_kernels()
    if mtp.exists:  # settings refuse it beside other backends
        given["mtp"] = mtp
    return BACKENDS[backend]()(
        hf_config,
        state,
        optimizer,
        dtype=compute_dtype(model),
        parallel=parallel,
        trainable=_trainable(model),
        critic=critic,
        lora=lora,
        exact=model.numerics == "exact",
        **given,
    )


def _trainable(model: ModelConfig) -> TrainableWeights:
    return TrainableWeights(model.freeze, model.train_only)


def rounding_of(learner: LearnerConfig, model: ModelConfig) -> Rounding | None:
    """Return how the weights are rounded that the learner computes with; None where they are not."""
    if not learner.quantisation_aware:
        return None
    return Rounding(FORMATS[learner.publication.quantisation], published_dtype(learner, model))
