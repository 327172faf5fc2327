"""The critic of megatron-core: a value model with an optimizer of its own, laid out as the policy is."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bus.errors import ConfigError
from learner.algorithms.losses.clipped import value_loss
from learner.algorithms.losses.objective import LoggedSums
from learner.backends.contract.backend import CriticSource, CriticUpdate
from learner.backends.megatron.core.ddp import data_parallel, release_gradients
from learner.backends.megatron.core.megatron_core import DistributedDataParallel
from learner.backends.megatron.model.model import PolicyModel, build_chunks
from learner.backends.megatron.model.value_model import HEAD, ValueModel
from learner.backends.megatron.optimizer.optimizer import (
    build_optimizer,
    configure_optimizer,
    give_up_optimizer,
)
from learner.backends.megatron.update_step import (
    accumulate_gradients,
    forward_logprobs,
    of_all_ranks,
    update_if_finite,
)
from learner.backends.megatron.weights.rank_weights import load_hf_weights
from learner.backends.update.decision import learning_rate, not_finite_in_a_row
from learner.config.critic import CriticConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import MicroBatch
from learner.model_directories.lazy_weights import SomeWeights, spec_of

SCORE = "score."
"""Begins the names of a value head in Hugging Face files, as of `AutoModelForTokenClassification`."""
EQUAL = 1e-12
"""Variance of targets, as a part of their mean square, up to which they are equal but for rounding."""
Shares = Callable[[Sequence[MicroBatch]], list[MicroBatch]]
"""Cuts micro-batches into this rank's shares, and adds idle ones where the schedule needs them."""


class MegatronCritic:
    """The critic on this rank. The policy is built before."""

    def __init__(
        self, source: CriticSource, *, dtype: torch.dtype, parallel: ParallelConfig, shares: Shares,
        policy: Sequence[PolicyModel], settle_policy: Callable[[], None],
    ) -> None:  # fmt: skip
        """Build the model and load its weights. A critic without a directory begins from `policy`, whose
        pieces of this rank these are; `settle_policy` finishes what still writes them."""
        self.hf_config = source.hf_config
        self.dtype = dtype
        self.parallel = parallel
        self._shares = shares
        self._policy, self._settle_policy = policy, settle_policy
        self._begins_as_policy = source.config.path is None
        self.chunks = build_chunks(source.hf_config, dtype=dtype, parallel=parallel, kind=ValueModel)
        _load(self.chunks, source)
        self.ddp = data_parallel(self.chunks, parallel)
        self._set_optimizer(source.config)

    def begin(self) -> None:
        """Start over with a fresh optimizer, as the policy is now unless there is a directory."""
        if self._begins_as_policy:
            self._settle_policy()
            self.settle_parameters()
            with torch.no_grad():
                for mine, theirs in zip(self.chunks, self._policy, strict=True):
                    weights = dict(theirs.named_parameters())
                    for name, parameter in mine.named_parameters():
                        parameter.zero_() if name.startswith(HEAD) else parameter.copy_(weights[name])
        self._set_optimizer(self._config)

    def _set_optimizer(self, config: CriticConfig) -> None:
        self._config = config
        self.settle_parameters()
        give_up_optimizer(self)
        self.optimizer = build_optimizer(config.optimizer, self.ddp, self.hf_config, self.dtype)
        self.updates_done = 0
        """Updates by this optimizer, which the schedule counts."""
        self.not_finite_in_a_row = 0

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the value before each trained label, float32 [T] on the host; NaN elsewhere."""
        found = forward_logprobs(self.ddp, micro_batches, self._shares(micro_batches))
        return [values[0] for values in found]

    def train_step(self, micro_batches: Sequence[MicroBatch], config: CriticConfig) -> CriticUpdate:
        """Update the weights once, on the mean loss of all values on all ranks and micro-batches."""
        optimizer = config.optimizer
        lr = learning_rate(optimizer, self.updates_done + 1)
        configure_optimizer(self.optimizer, optimizer, lr)
        per_micro_batch = accumulate_gradients(
            self.ddp, self.optimizer, self._shares(micro_batches), partial(forward_step, config)
        )
        names, totals = of_all_ranks(per_micro_batch)
        sums, norm = update_if_finite(
            self.optimizer, optimizer, names, totals,
            pipeline=self.parallel.pipeline, before_update=self._settle_policy,
        )  # fmt: skip
        values = int(sums["trained_tokens"])
        loss = sums["loss"] / (values or 1)
        updated = values > 0 and math.isfinite(loss) and math.isfinite(norm)
        self.updates_done += updated
        self.not_finite_in_a_row = not_finite_in_a_row(
            self.not_finite_in_a_row, loss, norm, optimizer, "learner.critic.optimizer"
        )
        return CriticUpdate(
            loss=loss,
            values=values,
            clipped=int(sums["clipped"]),
            explained_variance=_explained_variance(sums, values),
            value_mean=sums["values"] / (values or 1),
            target_mean=sums["targets"] / (values or 1),
            grad_norm=norm,
            lr=lr,
            skipped=not updated,
        )

    @property
    def optimizer_type(self) -> str:
        return self._config.optimizer.matrices

    def settle_parameters(self) -> None:
        """Finish the gathering of updated parameters, which otherwise goes on until the next pass."""
        if self.parallel.overlap_param_gather:
            for chunk in self.ddp:
                chunk.start_param_sync(force_sync=True)

    def release_memory(self) -> None:
        release_gradients(self.ddp)


def forward_step(
    config: CriticConfig, batches: Iterator[MicroBatch], model: DistributedDataParallel
) -> tuple[object, object]:
    """Megatron-core's protocol: the model's output, and a function from it to (loss sum, values, sums)."""
    batch = next(batches)
    return model(batch), partial(_loss_step, config, batch)


def _loss_step(
    config: CriticConfig, batch: MicroBatch, output: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, LoggedSums]:
    [values] = output
    targets, old = batch.of_trained("value_targets"), batch.of_trained("values")
    learned = ~torch.isnan(targets)  # of a turn only its first token
    targets, old = (torch.where(learned, kept, 0.0) for kept in (targets, old))
    losses, found = value_loss(values, old, targets, value_clip=config.value_clip)
    loss = config.loss_coef * (torch.where(learned, losses, 0.0) * batch.of_trained("group_weights")).sum()
    count = learned.sum(dtype=torch.int)
    errors = torch.where(learned, targets.double() - values.detach().double(), 0.0)
    return loss, count, {
        "loss": loss.detach(),
        "trained_tokens": count,
        "denominator": count.double(),
        "clipped": (found["clipped"] & learned).sum(),
        "values": torch.where(learned, values.detach(), 0.0).sum(dtype=torch.float64),
        "targets": targets.sum(dtype=torch.float64),
        "targets_squared": targets.double().square().sum(),
        "errors": errors.sum(),
        "errors_squared": errors.square().sum(),
    }  # fmt: skip


def _explained_variance(sums: dict[str, float], values: int) -> float | None:
    if values == 0:
        return None
    mean_square = sums["targets_squared"] / values
    variance = mean_square - (sums["targets"] / values) ** 2
    if not variance > EQUAL * mean_square:
        return None
    return 1 - (sums["errors_squared"] / values - (sums["errors"] / values) ** 2) / variance


def _load(chunks: Sequence[PolicyModel], source: CriticSource) -> None:
    """Copy weights into the model, and those of the head where there are any. Raises `ConfigError` for
    weights that do not fit."""
    head = {name for name in source.state if name.startswith(SCORE)}
    load_hf_weights(chunks, source.hf_config, SomeWeights(source.state, source.state.keys() - head))
    width = source.hf_config.hidden_size
    shapes = {"score.weight": (1, width), "score.bias": (1,)}
    for name in sorted(head):
        if spec_of(source.state, name).shape != shapes.get(name):
            raise ConfigError(
                f"{name} of the critic has the shape {list(spec_of(source.state, name).shape)}: a value head "
                f"is score.weight of [1, {width}], and score.bias of [1] if any"
            )
        with torch.no_grad():
            for chunk in chunks:
                if chunk.post_process:
                    chunk.get_parameter(HEAD + name.removeprefix(SCORE)).copy_(source.state[name])
