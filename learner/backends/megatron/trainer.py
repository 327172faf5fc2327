"""One optimizer step at a time: model, gradients, update, diagnostics."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor
from transformers import PretrainedConfig

from bus.errors import TrainingError
from learner.algorithms.entropy_bonus import EntropyBonus
from learner.algorithms.objective import Objective
from learner.backends.base import Exported, StepResult
from learner.backends.frozen import FrozenPolicies
from learner.backends.megatron.checkpoint.fingerprint import fingerprint
from learner.backends.megatron.checkpoint.state import (
    load_state,
    refuse_other_training,
    stage_state,
    training_state,
)
from learner.backends.megatron.checkpoint.writer import CopyBuffers, Staged
from learner.backends.megatron.conversion.weights import load_hf_weights
from learner.backends.megatron.core import get_forward_backward_func, parallel_state
from learner.backends.megatron.ddp import data_parallel
from learner.backends.megatron.device_memory import release_gradients, restore_gradients
from learner.backends.megatron.export import WeightExport
from learner.backends.megatron.forward import forward_logprobs
from learner.backends.megatron.loss_step import forward_step, step_diagnostics, sum_over_ranks
from learner.backends.megatron.model.model import PolicyModel, build_chunks
from learner.backends.megatron.optimizer.optimizer import (
    build_optimizer,
    configure_optimizer,
    gradient_norm,
    update,
)
from learner.backends.megatron.optimizer.schedule import learning_rate
from learner.backends.megatron.process_groups import (
    from_last_stage,
    tensor_from_last_stage,
)
from learner.backends.megatron.sharding import share_of_rank
from learner.backends.megatron.trainable import EVERYTHING, TrainableWeights
from learner.checkpoint.manifest import differences
from learner.config.loss import SFTLoss
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.data.packing import MicroBatch, empty_micro_batch
from learner.lazy_weights import State
from learner.world.process_group import device, most_over_ranks

CLIP_EPS = 1e-6
"""Added to the gradient norm before clipping, as in torch."""


class Trainer:
    """A model and its optimizer on this rank, the `Backend` of megatron-core. `init_world` comes first."""

    def __init__(
        self,
        hf_config: PretrainedConfig,
        state: State,
        optimizer: OptimizerConfig,
        *,
        dtype: torch.dtype = torch.float32,
        parallel: ParallelConfig = UNDIVIDED,
        trainable: TrainableWeights = EVERYTHING,
    ) -> None:
        """Build the model and load `state`, by Hugging Face names; `parallel` is what `init_world` got."""
        self.hf_config = hf_config
        self.dtype = dtype
        self.parallel = parallel
        self.chunks: list[PolicyModel] = build_chunks(hf_config, dtype=dtype, parallel=parallel)
        load_hf_weights(self.chunks, hf_config, state)
        self.trainable = trainable
        trainable.freeze_others(self.chunks, hf_config)
        self._export = WeightExport(self.chunks, hf_config)
        self._checkpoint_buffers = CopyBuffers()
        self._read: torch.cuda.Event | None = None
        """Event until which no weight may change."""
        self.ddp = data_parallel(self.chunks, parallel)
        self.frozen = FrozenPolicies(
            self.chunks, settle=self.settle_parameters, load=partial(load_hf_weights, self.chunks)
        )
        self.steps_done = 0
        """Calls of `train_step`, skipped ones included."""
        self.set_optimizer(optimizer)

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Start over with a fresh optimizer state and warm-up; the weights stay."""
        self.optimizer_config = config
        self.settle_parameters()
        self.optimizer = build_optimizer(config, self.ddp, self.dtype)
        self.updates_done = 0
        """Updates by this optimizer, which the schedule counts."""
        self.entropy_bonus: EntropyBonus | None = None
        """Weight of the entropy bonus where it aims at a target."""
        self.not_finite_in_a_row = 0
        """Updates skipped since the last whose loss and gradient were finite."""

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: SFTLoss | Objective,
        *,
        policy_version: int,
    ) -> StepResult:
        """Update the weights once, on the mean loss over the trained tokens of all ranks and micro-batches.

        Args:
            micro_batches: those of this data-parallel rank; equal on the ranks that share a model with it.
            loss: which loss to compute; one that wants other policies' log-probs finds them in the
                micro-batches.
            policy_version: of the weights before the update, to tell fresh tokens from stale ones.
        """
        lr = learning_rate(self.optimizer_config, self.updates_done + 1)
        configure_optimizer(self.optimizer, self.optimizer_config, lr)
        objective = self._with_entropy_bonus(loss if isinstance(loss, Objective) else Objective(loss))
        names, totals = self._accumulate_gradients(micro_batches, objective, policy_version)
        sums, norm = self._update(names, totals)
        tokens = int(sums["trained_tokens"])
        mean_loss = sums["loss"] / (sums["denominator"] or 1.0)
        updated = tokens > 0 and math.isfinite(mean_loss) and math.isfinite(norm)
        self.steps_done += 1
        self.updates_done += updated
        self._refuse_endless_skipping(mean_loss, norm)
        diagnostics = step_diagnostics(sums, tokens)
        if self.entropy_bonus is not None:
            diagnostics["entropy_coef"] = objective.entropy_coef
            if updated:
                entropy = diagnostics["entropy_nats"]
                self.entropy_bonus = self.entropy_bonus.after(entropy, objective.entropy_target)
        return StepResult(
            loss=mean_loss,
            grad_norm=norm,
            lr=lr,
            tokens=tokens,
            denominator=sums["denominator"],
            skipped=not updated,
            diagnostics=diagnostics,
        )

    def _with_entropy_bonus(self, objective: Objective) -> Objective:
        """Return the objective with the weight of the entropy bonus that earlier updates have led to."""
        if objective.entropy_target.nats is None:
            self.entropy_bonus = None
            return objective
        self.entropy_bonus = self.entropy_bonus or EntropyBonus(objective.entropy_coef)
        largest = objective.entropy_target.largest_coef  # may be lower than before a checkpoint
        return replace(objective, entropy_coef=min(self.entropy_bonus.used_coef, largest))

    def _update(self, names: list[str], totals: Tensor) -> tuple[dict[str, float], float]:
        """Update where the loss and the gradient allow it: the sums and the gradient's norm, as numbers.

        The device decides by itself, so that the host waits once, when everything has been put to work.
        """
        loss, tokens, denominator = self._loss_and_counts(names, totals)
        divisor = torch.where(denominator > 0, denominator, 1.0)
        norm = gradient_norm(self.optimizer) / divisor
        clipped = ((norm + CLIP_EPS) / self.optimizer_config.clip_grad).clamp(min=1)
        updated = (tokens > 0) & torch.isfinite(loss) & torch.isfinite(norm)
        self._await_readers()
        update(self.optimizer, divisor=(divisor * clipped).float(), skip=1.0 - updated.float())
        if self.parallel.pipeline > 1:
            names, totals = from_last_stage((names, totals.cpu()))
        *values, norm_value = torch.cat((totals, norm[None].to(totals.device))).tolist()
        return dict(zip(names, values, strict=True)), norm_value

    def _loss_and_counts(self, names: list[str], totals: Tensor) -> Tensor:
        """Send loss, trained tokens and denominator of all ranks, float64 [3], from the last stage to all."""
        values = torch.zeros(3, dtype=torch.float64, device=device())
        if names:
            wanted = ("loss", "trained_tokens", "denominator")
            torch.stack([totals[names.index(name)] for name in wanted], out=values)
        return tensor_from_last_stage(values)

    def _refuse_endless_skipping(self, loss: float, norm: float) -> None:
        finite = math.isfinite(loss) and math.isfinite(norm)
        self.not_finite_in_a_row = 0 if finite else self.not_finite_in_a_row + 1
        if self.not_finite_in_a_row >= self.optimizer_config.max_skipped_in_a_row:
            raise TrainingError(
                f"{self.not_finite_in_a_row} updates in a row were skipped: their loss or gradient was not "
                f"finite (the last: loss {loss}, gradient norm {norm}). Go on from an older checkpoint with "
                f"optimizer.lr below {self.optimizer_config.lr}, or raise optimizer.max_skipped_in_a_row"
            )

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probs and entropy in nats, float32 [2, T] on the host; NaN where nothing is
        trained."""
        return forward_logprobs(self.ddp, micro_batches, self.shares(micro_batches))

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks that train other trajectories on the same weights."""
        group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
        return group

    # --- weights out ---

    def export(self) -> dict[str, Tensor]:
        """Return copies of the weights by Hugging Face name, on rank 0; nothing on the others.

        Every rank calls this.
        """
        self.settle_parameters()
        return self._export.copies()

    def streamed(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by name on rank 0, each good until the next; every rank exhausts it."""
        self.settle_parameters()
        return self._export.stream()

    def exported(self) -> Exported:
        """Return the weights as rank 0 has them, to copy them at once; every other rank calls `export`."""
        self.settle_parameters()
        return self._export.views()

    @property
    def size_bytes(self) -> int:
        """Return the size of the weights on this rank."""
        return sum(parameter.nbytes for chunk in self.chunks for parameter in chunk.parameters())

    def keep_until(self, read: torch.cuda.Event) -> None:
        """Have the device change no weight before `read`; the host does not wait."""
        self._read = read

    def settle_parameters(self) -> None:
        """Finish what still reads or writes the parameters: a copy to the host, and the gathering of updated
        ones, which otherwise goes on until the next forward pass."""
        self._await_readers()
        if self.parallel.overlap_param_gather:
            for chunk in self.ddp:
                chunk.start_param_sync(force_sync=True)

    def _await_readers(self) -> None:
        if self._read is not None:
            torch.cuda.current_stream().wait_event(self._read)
            self._read = None

    def release_memory(self) -> None:
        """Free the memory for gradients, and what torch keeps for later; the next step takes it again."""
        release_gradients(self.ddp)

    # --- checkpoints ---

    def fingerprint(self) -> dict[str, JsonValue]:
        """Return the model's hyperparameters that decide which weights fit it."""
        return fingerprint(self.hf_config)

    def other_hyperparameters(self, hf_config: PretrainedConfig) -> list[str]:
        """List, for people, those by which weights of a model `hf_config` do not fit this one."""
        return differences(fingerprint(hf_config), self.fingerprint())

    def training_state(self) -> dict[str, JsonValue]:
        """Return where training stands, and what of it must be the same to go on from there."""
        return training_state(self)

    def stage_checkpoint(self, directory: Path) -> Staged:
        """Copy weights, optimizer, random generators and own frozen policies, to be written there."""
        return stage_state(self, directory, self._checkpoint_buffers)

    def refuse_other_training(self, directory: Path, training: Mapping[str, Any]) -> None:
        """Raise `ConfigError` when a checkpoint of that `training_state` does not fit."""
        refuse_other_training(directory, training, self)

    def load_checkpoint(self, directory: Path, training: Mapping[str, Any]) -> None:
        """Restore what `stage_checkpoint` wrote, and `training_state`. Raises `StorageError` if it cannot."""
        load_state(self, directory, training)

    @property
    def model(self) -> PolicyModel:
        """Return the model, where this rank has all of it."""
        [model] = self.chunks
        return model

    def _accumulate_gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        policy_version: int,
    ) -> tuple[list[str], Tensor]:
        restore_gradients(self.ddp)
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        shares = self.shares(micro_batches)
        per_micro_batch = get_forward_backward_func()(
            forward_step_func=partial(forward_step, objective, policy_version),
            data_iterator=[iter(shares) for _ in self.ddp],
            model=self.ddp,
            num_microbatches=len(shares),
            seq_length=len(shares[0].tokens),
            micro_batch_size=1,
        )
        return sum_over_ranks(per_micro_batch) if per_micro_batch else ([], torch.empty(0))

    def shares(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return this rank's share of each micro-batch, then as many idle ones as the schedule needs."""
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
            ).to(device())
            for batch in (*micro_batches, *idle)
        ]
