"""One optimizer step at a time: model, gradients, update, diagnostics."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor
from transformers import PretrainedConfig

from learner.algorithms.losses.objective import Objective
from learner.backends.contract.backend import CriticSource, Exported, StepResult, TrainedAdapters
from learner.backends.contract.frozen_policies import FrozenPolicies, Weights
from learner.backends.megatron.checkpoint_state import (
    StagedWrites,
    load_state,
    refuse_other_training,
    saved_tensors,
    stage_state,
    training_state,
)
from learner.backends.megatron.conversion.base import is_trained_with_adapters
from learner.backends.megatron.core.ddp import data_parallel, release_gradients
from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.critic import MegatronCritic
from learner.backends.megatron.fingerprint import fingerprint
from learner.backends.megatron.model.exact import make_exact
from learner.backends.megatron.model.lora import ChunkAdapters
from learner.backends.megatron.model.model import PolicyModel, build_chunks
from learner.backends.megatron.model.router_replay import ChosenExperts, given_experts
from learner.backends.megatron.model.value_model import ScoreModel
from learner.backends.megatron.next_token_head import TrainedHead, head_rules, with_following_tokens
from learner.backends.megatron.optimizer.optimizer import (
    build_optimizer,
    configure_optimizer,
    give_up_optimizer,
)
from learner.backends.megatron.optimizer.shards import lent_weights
from learner.backends.megatron.quantised import multiply_in_fp8, rounded_weights
from learner.backends.megatron.sharding import share_of_rank
from learner.backends.megatron.update_step import (
    accumulate_gradients,
    forward_logprobs,
    forward_step,
    of_all_ranks,
    update_if_finite,
)
from learner.backends.megatron.weights.export import WeightExport
from learner.backends.megatron.weights.frozen_weights import freeze_others, frozen_weights, refuse_idle_ranks
from learner.backends.megatron.weights.rank_weights import load_hf_weights, weights_beside, without_beside
from learner.backends.quantised.rounding import Rounding
from learner.backends.quantised.weights import RoundedWeights
from learner.backends.shared.given_experts import replay_figures
from learner.backends.shared.rope_scaling import refuse_scaled, unscaled_tokens
from learner.backends.shared.score_head import is_reward_model
from learner.backends.shared.trainable import EVERYTHING, TrainableWeights
from learner.backends.update.counts import UpdateCounts
from learner.backends.update.decision import learning_rate
from learner.backends.update.loss_step import importance_ratios
from learner.backends.update.step_times import StepTimes
from learner.config.lora import NO_LORA, LoraConfig
from learner.config.loss import Loss
from learner.config.mtp import NO_MTP, MtpConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.data.packing import MicroBatch, empty_micro_batch
from learner.distributed.process_group import device, most_over_ranks
from learner.host_memory.copies import CopyBuffers, StateReaders
from learner.model_directories.checkpoint_manifest import differences
from learner.model_directories.lazy_weights import State


class Trainer:
    """A model and its optimizer on this rank, the `Backend` of megatron-core. `init_world` comes first."""

    def __init__(  # noqa: PLR0913 - those of all backends
        self,
        hf_config: PretrainedConfig,
        state: State,
        optimizer: OptimizerConfig,
        *,
        dtype: torch.dtype = torch.float32,
        parallel: ParallelConfig = UNDIVIDED,
        trainable: TrainableWeights = EVERYTHING,
        critic: CriticSource | None = None,
        lora: LoraConfig = NO_LORA,
        mtp: MtpConfig = NO_MTP,
        exact: bool = False,
    ) -> None:
        """Build the model and load `state`, by Hugging Face names; `parallel` is what `init_world` got.

        With `critic` it has a critic beside it. With `lora`, adapters are trained, and `trainable` counts for
        nothing; with `mtp`, the head for the token after the next is; with `exact`, log-probs are those of
        the embedded engine to the bit. Raises `ConfigError` for a model that cannot be trained."""
        rules_of_head = head_rules(mtp, hf_config, state)
        self.hf_config = hf_config
        self.dtype = dtype
        self.parallel = parallel
        kind = ScoreModel if is_reward_model(hf_config) else PolicyModel
        self.chunks: list[PolicyModel] = build_chunks(hf_config, dtype=dtype, parallel=parallel, kind=kind)
        if exact:
            [whole] = self.chunks  # the configuration refuses parts of a model
            make_exact(whole)
        load_hf_weights(self.chunks, hf_config, without_beside(hf_config, state) if mtp.exists else state)
        frozen = frozen_weights(hf_config, trainable, rules_of_head)
        self.frozen_names = frozen - {rule.megatron for rule in rules_of_head}
        """Names in megatron-core of the policy's weights that settings freeze."""
        self.lora = self._adapters(lora, state) if lora.exists else None
        if self.lora is None:
            self._freeze(frozen, trainable)
        self.head: TrainedHead | None = None
        if mtp.exists:
            self.head = TrainedHead(
                mtp, self.chunks, hf_config, state, rules_of_head,
                frozen=frozen, dtype=dtype, parallel=parallel,
            )  # fmt: skip
        chunks = [*self.chunks, *(self.head.chunks if self.head else [])]
        self._export = WeightExport(chunks, hf_config, weights_beside(hf_config, state), rules_of_head)
        self._checkpoint_buffers = CopyBuffers()
        self._readers = StateReaders()
        self.ddp = data_parallel(self.chunks, parallel)
        self._rounded: RoundedWeights | None = None
        self.frozen = FrozenPolicies(self._live, load=self._load)
        self.counts = UpdateCounts()
        self.set_optimizer(optimizer)
        self.critic: MegatronCritic | None = None
        if critic is not None:
            self.critic = MegatronCritic(
                critic, dtype=dtype, parallel=parallel, shares=self.shares,
                policy=self.chunks, settle_policy=self.settle_parameters,
            )  # fmt: skip

    def _adapters(self, lora: LoraConfig, state: State) -> ChunkAdapters:
        adapters = ChunkAdapters(self.chunks, self.hf_config, lora, state)
        chosen = f"learner.lora.targets={list(lora.targets)}"
        refuse_idle_ranks(self.chunks, chosen, "name targets that every stage has")
        return adapters

    def _freeze(self, frozen: Set[str], trainable: TrainableWeights) -> None:
        freeze_others(self.chunks, self.hf_config, frozen)
        chosen = f"model.freeze={list(trainable.freeze)} and model.train_only={list(trainable.train_only)}"
        refuse_idle_ranks(self.chunks, chosen, "train some weights of every stage")

    def set_optimizer(self, config: OptimizerConfig) -> None:
        self.optimizer_config = config
        self.settle_parameters()
        give_up_optimizer(self)
        self.optimizer = build_optimizer(config, self.ddp, self.hf_config, self.dtype)
        if self.head is not None:
            self.head.set_optimizer(config)
        self.counts.begin()

    def compute_with(self, rounding: Rounding) -> None:
        self._rounded = rounded_weights(self.chunks, self.hf_config, rounding, self.dtype)

    def multiply_in_fp8(self) -> None:
        """Have the linear layers of the policy multiply in fp8 from the next pass on; a critic's do not."""
        multiply_in_fp8(self.chunks)

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: Loss | Objective, *, policy_version: int
    ) -> StepResult:
        lr = learning_rate(self.optimizer_config, self.counts.updates_done + 1)
        configure_optimizer(self.optimizer, self.optimizer_config, lr)
        objective = self.counts.objective(loss)
        if self.head is not None:
            if self.parallel.pipeline > 1:
                self.finish_gathering()
            self.head.begin()
            micro_batches = [with_following_tokens(batch) for batch in micro_batches]
        learns = None if self.head is None else self.head.learn
        with self._weights_of_engines():
            per_micro_batch = accumulate_gradients(
                self.ddp,
                self.optimizer,
                self.shares(micro_batches),
                partial(forward_step, objective, policy_version, learns),
            )
        names, totals = of_all_ranks(per_micro_batch)
        times = StepTimes()
        with times.part("optimizer_s"):
            sums, norm = update_if_finite(
                self.optimizer, self.optimizer_config, names, totals,
                pipeline=self.parallel.pipeline, before_update=self._readers.settle,
            )  # fmt: skip
        figures = {} if self.head is None else self.head.update(self.optimizer_config, lr)
        result = self.counts.finished(objective, sums, norm, lr, self.optimizer_config)
        if objective.replays_routing:
            figures |= replay_figures(given_experts(self._modules()).values())
        ratios = importance_ratios(
            micro_batches, per_micro_batch, parallel_state.get_context_parallel_group()
        )
        return replace(
            result, diagnostics=result.diagnostics | figures, seconds=times.seconds(), ratios=ratios
        )

    def _modules(self) -> Iterator[torch.nn.Module]:
        return (module for chunk in self.chunks for module in chunk.modules())

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        with self._weights_of_engines():
            return forward_logprobs(self.ddp, micro_batches, self.shares(micro_batches))

    def routed_logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[Tensor, Tensor]]:
        shares = self.shares(micro_batches)
        with ChosenExperts(self._modules()) as chosen, self._weights_of_engines():
            values = forward_logprobs(self.ddp, micro_batches, shares)
        config = self.chunks[0].config
        experts = [
            chosen.of_all_tokens(i, batch, share, config)
            for i, (batch, share) in enumerate(zip(micro_batches, shares, strict=False))  # idle: behind
        ]
        return list(zip(values, experts, strict=True))

    def top_tokens(self, micro_batches: Sequence[MicroBatch], count: int) -> list[Tensor]:
        with self._weights_of_engines():
            return forward_logprobs(self.ddp, micro_batches, self.shares(micro_batches), top=count)

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks that train other trajectories on the same weights."""
        group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
        return group

    # --- weights out ---

    @property
    def adapters(self) -> TrainedAdapters | None:
        return None if self.lora is None else self.lora.described()

    def export(self) -> dict[str, Tensor]:
        return {name: part.clone(memory_format=torch.contiguous_format) for name, part in self.streamed()}

    def streamed(self) -> Iterator[tuple[str, Tensor]]:
        self.finish_gathering()
        weights = self._export.stream()
        return weights if self.lora is None else self.lora.merged(weights)

    def exported(self) -> Exported:
        self.finish_gathering()
        if self.lora is None:
            return self._export.views()
        if self.lora.config.publish == "adapter":
            return self.lora.exported(self.dtype)
        views = self._export.views()
        if views.pieces is None:
            return replace(views, here={}, rest=self._merged)
        return replace(views, pieces=self.lora.merged_pieces(views.pieces))

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        assert self.lora is not None  # adapters are merged into what is published
        return self.lora.merged(self._export.trained())

    @property
    def size_bytes(self) -> int:
        policy: int = sum(parameter.nbytes for chunk in self.chunks for parameter in chunk.parameters())
        return policy + (0 if self.head is None else self.head.size_bytes)

    def before_change(self, let_change: Callable[[], None]) -> None:
        self._readers.published.append(let_change)

    def _live(self) -> Weights:
        self.settle_parameters()
        chunks = [dict(chunk.named_parameters()) for chunk in self.chunks]
        if self.lora is None:
            return chunks
        return [
            {name: each for name, each in chunk.items() if is_trained_with_adapters(name)} for chunk in chunks
        ]

    def _load(self, hf_config: PretrainedConfig, state: State) -> None:
        if self.lora is None:
            load_hf_weights(self.chunks, hf_config, state)
        else:  # with adapters, settings allow no other weights than those that are frozen
            self.lora.switch_off()

    @contextmanager
    def _weights_of_engines(self) -> Iterator[None]:
        """Let the model have rounded weights while inside, where it is to; other runs' policies have none."""
        if self._rounded is None or self.frozen.lends_foreign:
            yield
            return
        self.settle_parameters()
        with self._rounded.in_place():
            yield

    def settle_parameters(self) -> None:
        """Finish what still reads or writes the parameters, before they change: a publication, a checkpoint,
        and the gathering of updated ones, which otherwise goes on until the next forward pass."""
        self._readers.settle()
        self.finish_gathering()

    def finish_gathering(self) -> None:
        """Finish what still writes the parameters, for who only reads them."""
        if self.parallel.overlap_param_gather:
            for chunk in self.ddp:
                chunk.start_param_sync(force_sync=True)

    @contextmanager
    def lent_weights(self) -> Iterator[dict[str, Tensor]]:
        """Lend this rank's parts of the trained weights, by megatron-core's names."""
        self.settle_parameters()
        with lent_weights(self.optimizer, self.optimizer_config, self.ddp) as weights:
            yield weights

    def release_memory(self) -> None:
        release_gradients(self.ddp)
        if self.head is not None:
            self.head.release_memory()
        if self.critic is not None:
            self.critic.release_memory()

    # --- checkpoints ---

    def fingerprint(self) -> dict[str, JsonValue]:
        return fingerprint(self.hf_config)

    def other_hyperparameters(self, hf_config: PretrainedConfig) -> list[str]:
        return differences(fingerprint(hf_config), self.fingerprint())

    def training_state(self) -> dict[str, JsonValue]:
        return training_state(self)

    def prepare_checkpoints(self) -> None:
        if device().type == "cuda":
            self._checkpoint_buffers.prepare(saved_tensors(self))

    def stage_checkpoint(self, directory: Path) -> StagedWrites:
        staged = stage_state(self, directory, self._checkpoint_buffers)
        self._readers.saved = staged.copies
        return staged

    def refuse_other_training(self, directory: Path, training: Mapping[str, Any]) -> None:
        refuse_other_training(directory, training, self)

    def load_checkpoint(self, directory: Path, training: Mapping[str, Any]) -> None:
        load_state(self, directory, training)

    @property
    def model(self) -> PolicyModel:
        """Return the model, where this rank has all of it."""
        [model] = self.chunks
        return model

    def shares(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return this rank's share of each micro-batch, then as many idle ones as the schedule needs."""
        refuse_scaled(micro_batches, unscaled_tokens(self.hf_config))
        parallel = self.parallel
        count = max(1, len(micro_batches))
        if parallel.expert * parallel.expert_tensor > 1:  # experts are reached by all their ranks at once
            count = most_over_ranks(count)
        if parallel.virtual_pipeline > 1:
            count = -(-count // parallel.pipeline) * parallel.pipeline
        idle = [empty_micro_batch()] * (count - len(micro_batches))
        return [
            share_of_rank(
                batch,
                ranks=parallel.context,
                rank=parallel_state.get_context_parallel_rank(),
                multiple=parallel.tensor if parallel.sequence else 1,
                min_tokens=parallel.context_min_tokens,
            ).to(device())
            for batch in (*micro_batches, *idle)
        ]
