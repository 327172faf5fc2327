"""Tells what the learner asks of whatever holds and trains the model: its weights, its optimizer, their
files.

The loop, the objective, scoring, publication and the commit of checkpoints know this module alone. Which
backend is built is decided in learner/backends/factory.py."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor
from transformers import PretrainedConfig

from bus.messages import AdaptedBase, BlobRef
from learner.algorithms.losses.objective import Objective
from learner.backends.contract.frozen_policies import FrozenPolicies
from learner.backends.quantised.rounding import Rounding
from learner.config.critic import CriticConfig
from learner.config.lora import LoraConfig
from learner.config.loss import Loss
from learner.config.optimizer import OptimizerConfig
from learner.data.outcomes import ImportanceRatios
from learner.data.packing import MicroBatch
from learner.host_memory.copies import StateCopies
from learner.model_directories.lazy_weights import State


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Says what one optimizer step did, over all data-parallel ranks."""

    loss: float
    """Sum of the token losses over the sum of their denominators (learner/algorithms/aggregation.py)."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    lr: float
    tokens: int
    """Trained tokens."""
    computed_tokens: int
    """Tokens that went through the model: prompts and padding too, shared prefixes once."""
    denominator: float
    """Says what the sum of the token losses was divided by; the trained tokens with a mean over tokens."""
    skipped: bool
    """The loss or the gradient was not finite, or no token was trained: the weights are as before. Where
    several updates share a step (learner/step/rl_step.py): at least one of them was skipped."""
    diagnostics: dict[str, float]
    """Means over the trained tokens that went through the model; names and units in
    learner/algorithms/diagnostics.py."""
    left_out_tokens: int = 0
    """Trained tokens that did not, since no gradient comes from their trajectories."""
    critic: Mapping[str, float] = field(default_factory=dict)
    """Figures of the critic's updates; their names are in learner/step/rl_step.py."""
    pairs: Mapping[str, float] = field(default_factory=dict)
    """Means over pairs of answers, by the names of TRL (learner/algorithms/losses/preference.py)."""
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Seconds of the step's parts on this rank, such as `optimizer_s`."""
    ratios: Mapping[str, ImportanceRatios] = field(default_factory=dict, compare=False)
    """Importance ratios of the samples of this rank, by name, where it has the log-probs: before the last
    stage of a pipeline it has none."""

    @property
    def ess_fraction(self) -> float | None:
        """Return the effective sample size as a fraction of the tokens; `None` where it is not known."""
        found = self.diagnostics.get("ess_fraction")
        return found if found is not None and isfinite(found) else None


NO_TENSORS: Callable[[], Iterator[tuple[str, Tensor]]] = partial(iter, ())


@dataclass(frozen=True, slots=True)
class ExportedPiece:
    """Rows of a weight that this rank has, and where they lie in the published tensors."""

    rows: Tensor
    """[rows, columns], a view of the weight."""
    dtype: torch.dtype
    """Dtype in which the weight is computed with; its memory may have another."""
    names: Sequence[str]
    """Published tensors of which there are rows."""
    tensors: Tensor
    """int64 [rows], the number of each row's tensor among `names`."""
    starts: Tensor
    """int64 [rows], the place in that tensor of each row's first element."""
    step: int = 1
    """Distance there of the elements of a row from one another."""
    made: Callable[[slice], Tensor] | None = None
    """Makes what is published of some of the rows, such as what they and adapters make together; None where
    these are the rows themselves."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The weights by Hugging Face name, or adapters by peft's, where they lie."""

    shapes: Mapping[str, tuple[int, ...]]
    """The shape of every tensor."""
    here: Mapping[str, Tensor]
    """Views of those that this rank has complete, their elements in order."""
    rest: Callable[[], Iterator[tuple[str, Tensor]]]
    """Yields the others, one after another, each good until the next, where one rank has the model alone."""
    exact: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Weights that are computed with in a dtype of their own, in which they are published."""
    unchanging: Callable[[], Iterator[tuple[str, Tensor]]] = NO_TENSORS
    """Reads weights that are not trained and lie with the initial model, on the first rank, one after
    another; an equal function reads equal ones."""
    pieces: Sequence[ExportedPiece] | None = None
    """This rank's part of the weights, where the ranks share them: together they have each element at least
    once, and each time the same rows in the same order. `here` and `rest` have nothing then. None where one
    rank has the model alone."""


@dataclass(frozen=True, slots=True)
class TrainedAdapters:
    """Low-rank adapters that are trained instead of the weights (learner/backends/shared/lora.py)."""

    config: LoraConfig
    base: State
    """The frozen weights by Hugging Face name, as they were loaded."""
    exact: Mapping[str, torch.dtype]
    """Weights that are computed with in a dtype of their own, in which they are published."""
    modules: Sequence[str]
    """Names of the linear layers that have one."""
    streamed: Callable[[], Iterator[tuple[str, Tensor]]]
    """Yields A and B of each, and lengths of rows where these are trained, by peft's names in float32 on rank
    0, each good until the next. Every rank calls it and exhausts the iterator."""
    whole: Sequence[str] = ()
    """Names of weights that are trained whole beside them, and streamed too: the head of a reward model."""

    def described(self, weights: Sequence[BlobRef], digest: str) -> AdaptedBase:
        """Return what is announced of the adapters; `weights` are where the frozen ones were published, and
        `digest` is that of all of them."""
        modules = sorted(
            {".".join([p for p in module.split(".") if not p.isdigit()][-2:]) for module in self.modules}
        )
        return AdaptedBase(
            weights=weights[0],
            rest=tuple(weights[1:]),
            digest=digest,
            scale=self.config.scale,
            rank=self.config.rank,
            modules=tuple(modules),
            weight_decomposed=self.config.weight_decomposed,
        )


class StagedFiles(Protocol):
    """A rank's part of a checkpoint, copied to the host; training may go on, and nothing is written yet."""

    @property
    def copies(self) -> StateCopies:
        """Return the copies, which know for how long training waited for them."""

    def write(self) -> dict[str, str]:
        """Write this rank's files on a thread, without any collective; return their xxh3-128 by name."""

    def finalize(self) -> None:
        """Write what describes all files. Every rank calls this, where its collectives are called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSource:
    """Says what a critic is made from."""

    config: CriticConfig
    hf_config: PretrainedConfig
    state: State
    """Weights by Hugging Face name, of which those of the value head may be missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticUpdate:
    """Says what one update of the critic did, over all data-parallel ranks."""

    loss: float
    """Mean over the `values`, with `critic.loss_coef`."""
    values: int
    """Number of values that were trained."""
    clipped: int
    """Number of values that had moved too far for their loss to fall (`critic.value_clip`)."""
    explained_variance: float | None
    """1 - Var(target - value) / Var(target) before the update; None where all targets are equal."""
    value_mean: float
    target_mean: float
    grad_norm: float
    """Norm of the gradient before clipping."""
    lr: float
    skipped: bool
    """The loss or the gradient was not finite, or there was no value: the weights are as before."""


class Critic(Protocol):
    """A model with one output beside the policy, on the same ranks, and its own optimizer."""

    def begin(self) -> None:
        """Start over with a fresh optimizer, and as the policy is now unless it has a directory of its own.
        Every rank calls this when reinforcement learning begins."""

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the value of the state before each trained label, float32 [T] on the host; NaN elsewhere.
        Every rank calls this; nothing of the critic changes."""

    def train_step(self, micro_batches: Sequence[MicroBatch], config: CriticConfig) -> CriticUpdate:
        """Update the critic once, on the mean loss of the labels that have `value_targets`, on all ranks.
        Raises `TrainingError` after `optimizer.max_skipped_in_a_row` updates that were not finite."""


class Backend(Protocol):
    """A model and its optimizer on this rank. `factory.init_world` comes first.

    Every rank calls the same methods in the same order, on the thread where torch works: most are collective.
    T is the tokens of a micro-batch, padding between its sequences left out. Where a micro-batch has a
    `tree`, a backend may compute each of its segments once: it changes nothing else."""

    hf_config: PretrainedConfig
    optimizer_config: OptimizerConfig
    """Read at each step: retraining changes it between two, while the optimizer's state stays."""
    frozen: FrozenPolicies
    """Other policies that lend the model their weights: reference and teachers."""

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks that train other trajectories on the same weights; its rank says which share is
        ours.

        The rank calls it to fetch its groups, `rl_step` to add up the counts of a batch."""

    @property
    def critic(self) -> Critic | None:
        """Return the model that predicts rewards, where the run has one."""

    # --- training: learner/step/rl_step.py, learner/logprobs, learner/step/warmup.py ---

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: Loss | Objective, *, policy_version: int
    ) -> StepResult:
        """Update the weights once, on the aggregated loss of all ranks and micro-batches.

        Args:
            micro_batches: those of this data-parallel rank; equal on the ranks that share a model with it.
                Their denominators count samples that are left out of them too.
            loss: which loss to compute; one that wants other policies' log-probs finds them in the
                micro-batches.
            policy_version: of the weights before the update, to tell fresh tokens from stale ones.

        Raises `TrainingError` after `optimizer.max_skipped_in_a_row` updates that were not finite."""

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probs and entropy in nats, float32 [2, T] on the host, of the labels of each
        micro-batch. A label with a kept set has its log-prob within that.

        NaN where no label is trained. Nothing of the backend changes."""

    def routed_logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[Tensor, Tensor]]:
        """Return what `logprobs` does, and with each the experts that its tokens were sent to, int16
        [T, layers, experts per token] on the host; `OWN_CHOICE` in layers without experts.

        The model is a mixture of experts, and the configuration allows it with this backend."""

    def top_tokens(self, micro_batches: Sequence[MicroBatch], count: int) -> list[Tensor]:
        """Return the likeliest tokens where a label of each micro-batch is trained, float32 [2 count + 1, T].

        On the host: their ids, which a float32 holds exactly up to 2^24, their log-probs in nats, and in the
        last row that of all others together. They are over the whole vocabulary, whatever set a label has.
        Behind a vocabulary of fewer tokens the id is -1 and the log-prob -inf; NaN where no label is trained.
        Nothing of the backend changes."""

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Start over with a fresh optimizer state and learning-rate warm-up; the weights stay."""

    def lent_weights(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Lend this rank's parts of the trained weights as the optimizer has them, by the backend's names.

        Every rank enters and leaves. What is changed in place inside is what the next pass computes with.
        Parts may have lost the shape of their weight. `learner/algorithms/hooks.py` lends them on."""

    def compute_with(self, rounding: Rounding) -> None:
        """Compute with the weights of engines that quantise so, from the next pass on; update, export and
        save those that it has.

        Gradients go straight through the rounding. Policies that were read from directories are not rounded.
        Raises `ConfigError` for a model that cannot be quantised so."""

    def multiply_in_fp8(self) -> None:
        """Have the linear layers of the transformer blocks multiply in fp8 from the next pass on
        (learner/backends/quantised/matmul.py). Raises `ConfigError` for sizes that do not allow it."""

    def release_memory(self) -> None:
        """Leave to other processes what the next step does not need of the device; that step takes it back.
        The learner calls it before it yields a device that it shares with actors."""

    # --- weights out: learner/publication/host_copy.py and the export at the end ---

    @property
    def adapters(self) -> TrainedAdapters | None:
        """Return the adapters that are trained instead of the weights; None where these are trained. `export`
        and `streamed` give the weights that the adapters make of the frozen ones."""

    def export(self) -> dict[str, Tensor]:
        """Return copies of the weights by Hugging Face name, on rank 0; nothing on the others. Every rank
        calls this."""

    def streamed(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by Hugging Face name on rank 0, each good until the next; nothing on the others.
        Every rank calls this and exhausts the iterator."""

    def exported(self) -> Exported:
        """Return the tensors to publish, to copy them at once; every rank takes its part. These are the
        weights, or with `learner.lora.publish=adapter` the adapters by peft's names."""

    def before_change(self, let_change: Callable[[], None]) -> None:
        """Call this once before any weight of those exported last changes, even for a while. On a GPU it has
        the device wait, and the host does not."""

    @property
    def size_bytes(self) -> int:
        """Return the size of the weights on this rank."""

    # --- checkpoints: learner/checkpoint/commit.py ---

    def fingerprint(self) -> dict[str, JsonValue]:
        """Return the model's hyperparameters that decide which weights fit it."""

    def other_hyperparameters(self, hf_config: PretrainedConfig) -> list[str]:
        """List, for people, those by which weights of a model `hf_config` do not fit this one."""

    def training_state(self) -> dict[str, JsonValue]:
        """Return where training stands, and what of it must be the same to go on from there."""

    def prepare_checkpoints(self) -> None:
        """Begin to lock the memory that checkpoints are copied to, beside training, where there is a GPU.
        Every rank calls this when its state is whole."""

    def stage_checkpoint(self, directory: Path) -> StagedFiles:
        """Begin to copy weights, optimizer, random generators, own frozen policies and critic, to be written
        there. Training may go on at once: whatever changes them waits for the copy."""

    def refuse_other_training(self, directory: Path, training: Mapping[str, Any]) -> None:
        """Raise `ConfigError` when a checkpoint of that `training_state` does not fit this backend."""

    def load_checkpoint(self, directory: Path, training: Mapping[str, Any]) -> None:
        """Restore what `stage_checkpoint` wrote, and `training_state`. Raises `StorageError` if it cannot."""
