"""The `Backend` of any causal language model of transformers, sharded by torch's FSDP2."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

from bus.errors import ConfigError
from learner.algorithms.losses.objective import Objective
from learner.backends.contract.backend import (
    NO_TENSORS,
    CriticSource,
    Exported,
    ExportedPiece,
    StepResult,
    TrainedAdapters,
)
from learner.backends.contract.frozen_policies import FrozenPolicies, Weights
from learner.backends.fsdp import checkpoint
from learner.backends.fsdp.build import empty_model
from learner.backends.fsdp.fingerprint import fingerprint
from learner.backends.fsdp.lora import ModelAdapters, add_adapters
from learner.backends.fsdp.matrices import FileMatrices, matrix_names
from learner.backends.fsdp.model import shard
from learner.backends.fsdp.names import FileNames, freeze, lasting_tensors
from learner.backends.fsdp.optimizer import ShardedOptimizer
from learner.backends.fsdp.quantised import multiply_in_fp8, rounded_weights
from learner.backends.fsdp.self_check import refuse_other_results
from learner.backends.fsdp.sglang_model import refuse_other_dtype
from learner.backends.fsdp.weights import exported_pieces, load_weights, local, stream_weights, whole_here
from learner.backends.quantised.rounding import Rounding
from learner.backends.quantised.weights import RoundedWeights
from learner.backends.sglang_kernels.kernels import SglangKernels
from learner.backends.shared.given_experts import replay_figures
from learner.backends.shared.lora import refuse_other_adapters
from learner.backends.shared.score_head import SCORE_HEAD
from learner.backends.shared.trainable import EVERYTHING, TrainableWeights, refuse_other_frozen
from learner.backends.update.counts import UpdateCounts
from learner.backends.update.decision import decide, learning_rate
from learner.backends.update.loss_step import MicroBatchLoss, added_up, importance_ratios
from learner.backends.update.muon import refuse_other_optimizer
from learner.backends.update.step_times import StepTimes
from learner.config.lora import NO_LORA, LoraConfig
from learner.config.loss import Loss
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.data.packing import MicroBatch, empty_micro_batch
from learner.distributed.process_group import device, most_over_ranks
from learner.host_memory.copies import CopyBuffers, StateReaders
from learner.model_directories.checkpoint_manifest import differences
from learner.model_directories.lazy_weights import SomeWeights, State
from storage.images.reader import ImageReader


class FsdpTrainer:
    """A model and its optimizer on this rank. Every rank is data parallel, and has a part of every tensor."""

    critic: None = None
    """There is none: the configuration refuses objectives that want one."""

    def __init__(  # noqa: PLR0913 - those of all backends, and the images
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
        exact: bool = False,
        images: ImageReader | None = None,
        kernels: SglangKernels | None = None,
    ) -> None:
        """Build the model, load `state` by Hugging Face names, and prove that it computes what transformers
        does. With `lora`, adapters are trained and `trainable` counts for nothing; with `exact`, log-probs
        are those of the embedded engine to the bit; with `kernels`, it computes as a server of SGLang does.
        `images` are those of a vision-language model.

        Raises `ConfigError` for models, settings and weights that cannot be trained."""
        if critic is not None:
            raise ConfigError("learner.backend=fsdp has no critic: use megatron, or an advantage without one")
        if kernels is not None:
            refuse_other_dtype(dtype)
        self.hf_config = hf_config
        self.dtype = dtype
        self._names = FileNames(hf_config)
        hf_model = empty_model(hf_config, torch.device("cpu"))
        self._frozen_weights: set[str] = set()
        if lora.exists:
            adapted = add_adapters(hf_model, self._names, lora, dtype)
        else:
            self._frozen_weights = freeze(hf_model, self._names, trainable)
        self.model = shard(
            hf_model, dtype=dtype, offload=bool(optimizer.offload), recompute=parallel.recompute == "full",
            exact=exact, images=images, kernels=kernels,
        )  # fmt: skip
        self._offloaded = bool(optimizer.offload)
        self._tensors = lasting_tensors(hf_model)
        self._adapters: ModelAdapters | None = None
        if lora.exists:
            frozen = {name: shape for name, shape in self._names.files.items() if name != SCORE_HEAD}
            base = SomeWeights(state, frozen)
            self._adapters = ModelAdapters(lora, adapted, base, self._tensors, dtype)
        load_weights(self._tensors, self._names, state)
        refuse_other_results(self.model, hf_config.get_text_config().vocab_size, dtype)
        self._rounded: RoundedWeights | None = None
        self._checkpoint_buffers = CopyBuffers()
        self._readers = StateReaders()
        self._pieces: tuple[list[int], list[ExportedPiece]] | None = None
        """Where the weights lay when these were made."""
        self.frozen = FrozenPolicies(self._live, load=self._load)
        self.counts = UpdateCounts()
        self.set_optimizer(optimizer)

    def set_optimizer(self, config: OptimizerConfig) -> None:
        if bool(config.offload) != self._offloaded:
            raise ConfigError(
                "optimizer.offload of the warm-up and of reinforcement learning must be the same with "
                "learner.backend=fsdp"
            )
        self._settle()
        self.optimizer_config = config
        matrices = {}
        if config.matrices == "muon":
            matrices = {n: FileMatrices(n, self._names) for n in matrix_names(self.model.hf, self._names)}
        vars(self).pop("optimizer", None)  # old moments are freed before there are others
        self.optimizer = ShardedOptimizer(config, self._parameters, matrices, self.dtype)
        self.counts.begin()

    def compute_with(self, rounding: Rounding) -> None:
        self._rounded = rounded_weights(self._tensors, self._names, rounding, self.dtype)

    def multiply_in_fp8(self) -> None:
        multiply_in_fp8(self.model)

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: Loss | Objective, *, policy_version: int
    ) -> StepResult:
        config = self.optimizer_config
        lr = learning_rate(config, self.counts.updates_done + 1)
        objective = self.counts.objective(loss)
        self.optimizer.clear_gradients()
        per_micro_batch = []
        with self._weights_of_engines():
            for batch in self._shares(micro_batches):
                step = MicroBatchLoss.of(objective, batch, policy_version=policy_version)
                loss_sum, _, sums = step.of_output(self.model(batch, step.token_loss))
                loss_sum.backward()  # type: ignore[no-untyped-call]
                per_micro_batch.append(sums)
        names, totals = added_up(per_micro_batch)
        dist.all_reduce(totals)
        total = dict(zip(names, totals, strict=True))
        times = StepTimes()
        with times.part("optimizer_s"):
            decision = decide(
                total["loss"],
                total["trained_tokens"],
                total["denominator"],
                self.optimizer.gradient_norm(),
                config.clip_grad,
            )
            self._settle()
            self.optimizer.update(config, lr, decision)
            self.optimizer.clear_gradients()
        *values, norm = torch.cat((totals, decision.norm[None].to(totals.dtype))).tolist()
        of_step = dict(zip(names, values, strict=True))
        result = self.counts.finished(objective, of_step, norm, lr, config)
        ratios = importance_ratios(micro_batches, per_micro_batch)
        result = replace(result, seconds=times.seconds(), ratios=ratios)
        if not objective.replays_routing:
            return result
        figures = replay_figures(self.model.replay.given.values())
        return replace(result, diagnostics=result.diagnostics | figures)

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        return self._passed(micro_batches, top=0)

    def routed_logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[Tensor, Tensor]]:
        self.model.replay.note()
        try:
            values = self.logprobs(micro_batches)
        finally:
            experts = self.model.replay.noted()
        return list(zip(values, experts, strict=False))  # experts of idle micro-batches are behind

    def top_tokens(self, micro_batches: Sequence[MicroBatch], count: int) -> list[Tensor]:
        return self._passed(micro_batches, top=count)

    @torch.no_grad()
    def _passed(self, micro_batches: Sequence[MicroBatch], *, top: int) -> list[Tensor]:
        found = []
        with self._weights_of_engines():
            for batch in self._shares(micro_batches):
                output = self.model(batch, top=top)
                parts = [values.float().t() for values in output] if top else output[:2]
                rows = torch.cat(parts) if top else torch.stack(parts)
                every = torch.full((len(rows), len(batch.tokens)), torch.nan, device=rows.device)
                found.append(every.index_copy_(1, batch.trained, rows).cpu())
        self.model.forget_gathered()
        return found[: len(micro_batches)]

    def _shares(self, micro_batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches on the device, then as many idle ones as other ranks have more: each pass
        gathers every layer from all ranks."""
        missing = max(1, most_over_ranks(len(micro_batches))) - len(micro_batches)
        for batch in (*micro_batches, *[empty_micro_batch()] * missing):
            yield batch.to(device())

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]  # there is one
        return group

    @contextmanager
    def lent_weights(self) -> Iterator[dict[str, Tensor]]:
        """Lend this rank's parts of the trained weights, by transformers' names."""
        self._settle()
        yield self.optimizer.parts

    def release_memory(self) -> None:
        self._settle()
        self.optimizer.clear_gradients()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @property
    def _changing(self) -> dict[str, Tensor]:
        return self._tensors if self._adapters is None else self._adapters.tensors

    @property
    def _parameters(self) -> dict[str, Any]:
        return {name: each for name, each in self._changing.items() if isinstance(each, torch.nn.Parameter)}

    def _live(self) -> Weights:
        self._settle()
        return [{name: local(tensor) for name, tensor in self._changing.items()}]

    def _load(self, hf_config: PretrainedConfig, state: State) -> None:
        if other := self.other_hyperparameters(hf_config):
            raise ConfigError(f"its weights do not fit this model: {', '.join(other)}")
        if self._adapters is None:
            load_weights(self._tensors, self._names, state)
        else:  # with adapters, settings allow no other weights than those that are frozen
            self._adapters.switch_off()

    @contextmanager
    def _weights_of_engines(self) -> Iterator[None]:
        """Let the model have rounded weights while inside, where it is to; other runs' policies have none."""
        if self._rounded is None or self.frozen.lends_foreign:
            yield
            return
        self._settle()
        with self._rounded.in_place():
            yield
        self._settle()

    def _settle(self) -> None:
        """Let the state change: wait for what still reads it, and forget what a pass left gathered: the next
        pass gathers what has changed."""
        self._readers.settle()
        self.model.forget_gathered()

    # --- weights out ---

    @property
    def adapters(self) -> TrainedAdapters | None:
        return None if self._adapters is None else self._adapters.described(self._float32_buffers)

    def export(self) -> dict[str, Tensor]:
        return {name: part.clone(memory_format=torch.contiguous_format) for name, part in self.streamed()}

    def streamed(self) -> Iterator[tuple[str, Tensor]]:
        self.model.forget_gathered()
        yield from self._streamed(self._tensors)

    def _streamed(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        weights = stream_weights(tensors, self._names, self.dtype)
        return weights if self._adapters is None else self._adapters.merged(weights, self.dtype)

    def exported(self) -> Exported:
        self.model.forget_gathered()
        adapters = self._adapters
        if adapters is not None and adapters.config.publish == "adapter":
            return adapters.exported(self.dtype)
        if dist.get_world_size() > 1:
            addresses = [local(tensor).data_ptr() for tensor in self._tensors.values()]
            if self._pieces is None or self._pieces[0] != addresses:
                found = list(exported_pieces(self._tensors, self._names, self.dtype))
                self._pieces = addresses, found
            pieces = self._pieces[1]
            if adapters is not None:
                pieces = adapters.merged_pieces(pieces, self.dtype)
            return Exported(self._names.files, {}, NO_TENSORS, self._float32_buffers, pieces=pieces)
        here: dict[str, Tensor] = {}
        if self.dtype == torch.float32:
            adapted = set[str]() if adapters is None else adapters.weights
            unmerged = {name: each for name, each in self._tensors.items() if name not in adapted}
            here = whole_here(unmerged, self._names)
        left = {
            name: tensor
            for name, tensor in self._tensors.items()
            if not here.keys() >= self._names.tensors[name].files.keys()
        }
        return Exported(self._names.files, here, partial(self._streamed, left), self._float32_buffers)

    @property
    def _float32_buffers(self) -> dict[str, torch.dtype]:
        buffers = [name for name, each in self._tensors.items() if not isinstance(each, torch.nn.Parameter)]
        exact = [name for name in buffers if self._tensors[name].dtype == torch.float32]
        return {file: torch.float32 for name in exact for file in self._names.tensors[name].files}

    @property
    def size_bytes(self) -> int:
        return sum(local(tensor).nbytes for tensor in self._tensors.values())

    def before_change(self, let_change: Callable[[], None]) -> None:
        self._readers.published.append(let_change)

    # --- checkpoints ---

    def fingerprint(self) -> dict[str, JsonValue]:
        return fingerprint(self.hf_config)

    def other_hyperparameters(self, hf_config: PretrainedConfig) -> list[str]:
        return differences(fingerprint(hf_config), self.fingerprint())

    def training_state(self) -> dict[str, JsonValue]:
        return {
            "backend": "fsdp",
            **self.counts.saved(),
            "ranks": dist.get_world_size(),
            "optimizer": self.optimizer_config.matrices,
            "frozen": [*sorted(self._frozen_weights)],
            "lora": None if self._adapters is None else self._adapters.base.saved(),
            "policies": [*sorted(self.frozen.own)],
        }

    def prepare_checkpoints(self) -> None:
        self._checkpoint_buffers.prepare(local(tensor) for tensor in self._saved().values())

    def _saved(self) -> dict[str, Tensor]:
        policies = {tag: self.frozen.weights(tag) for tag in self.frozen.own}
        return self._entries(policies) | checkpoint.generator_states()

    def stage_checkpoint(self, directory: Path) -> checkpoint.StagedShards:
        """Begin to copy weights, optimizer, random generators and own frozen policies, to be written there.
        Of a model with adapters these alone are copied."""
        self.model.forget_gathered()
        entries = self._saved()
        staged = checkpoint.stage(entries, directory, self._checkpoint_buffers)
        self._readers.saved = staged.copies
        return staged

    def refuse_other_training(self, directory: Path, training: Mapping[str, Any]) -> None:
        refuse_other_optimizer(directory, training.get("optimizer", "adamw"), self.optimizer_config.matrices)
        ours = None if self._adapters is None else self._adapters.base.saved()
        refuse_other_adapters(directory, training.get("lora"), ours)
        refuse_other_frozen(directory, training["frozen"], self._frozen_weights)

    def load_checkpoint(self, directory: Path, training: Mapping[str, Any]) -> None:
        self._settle()
        policies = {tag: self.frozen.weights(tag) for tag in training["policies"]}
        same_ranks = training["ranks"] == dist.get_world_size()  # else whose generators would they be?
        generators = checkpoint.generator_states() if same_ranks else {}
        checkpoint.load(self._entries(policies) | generators, directory)
        for tag, weights in policies.items():
            self.frozen.restore(tag, weights)
        checkpoint.restore_generators(generators)
        self.counts.restore(training)
        self.optimizer.restore_steps(self.counts.updates_done)

    def _entries(self, policies: Mapping[str, Weights]) -> dict[str, Tensor]:
        changing = self._changing
        entries = {f"{checkpoint.MODEL}{name}": tensor.detach() for name, tensor in changing.items()}
        for name, (parameter, mine) in self.optimizer.moments().items():
            entries[f"optimizer.{name}"] = checkpoint.like(parameter, mine)
        for tag, [weights] in sorted(policies.items()):
            for name, mine in weights.items():
                entries[f"policies.{tag}.{name}"] = checkpoint.like(changing[name], mine)
        return entries
