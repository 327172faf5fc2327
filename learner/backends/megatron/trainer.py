"""One optimizer step at a time: model, gradients, update, diagnostics."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from bus.errors import TrainingError
from learner.algorithms.diagnostics import off_policy_diagnostics, off_policy_sums
from learner.algorithms.objective import DISTANCES, Objective, compute_loss
from learner.backends.megatron.conversion.base import State
from learner.backends.megatron.conversion.weights import (
    Holders,
    exported_shapes,
    find_holders,
    load_hf_weights,
    stream_hf_weights,
    whole_on_rank_0,
)
from learner.backends.megatron.core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    get_forward_backward_func,
    parallel_state,
    tensor_parallel,
)
from learner.backends.megatron.device_memory import take_room
from learner.backends.megatron.frozen import FrozenPolicies
from learner.backends.megatron.model.model import PolicyModel, build_chunks
from learner.backends.megatron.optimizer.optimizer import (
    build_optimizer,
    configure_optimizer,
    gradient_norm,
    update,
)
from learner.backends.megatron.optimizer.schedule import learning_rate
from learner.backends.megatron.process_groups import (
    data_parallel_sum,
    device,
    from_last_stage,
    most_over_ranks,
    tensor_from_last_stage,
)
from learner.backends.megatron.trainable import EVERYTHING, TrainableWeights
from learner.config.algorithm import PPOClipLoss, SFTLoss, TISLoss
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.data.packing import MicroBatch, TrainedTokens, empty_micro_batch
from learner.data.sharding import share_of_rank

Loss = TISLoss | PPOClipLoss | SFTLoss
Sums = dict[str, Tensor]
LINEAR = (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)
CLIP_EPS = 1e-6
"""Added to the gradient norm before clipping, as in torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step did, over all data-parallel ranks."""

    loss: float
    """Mean over the trained tokens."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Trained tokens."""
    skipped: bool
    """The loss or the gradient was not finite, or no token was trained: the weights are as before. Where
    several updates share a step (learner/algorithms/rl_step.py): at least one of them was skipped."""
    diagnostics: dict[str, float]
    """Means over the trained tokens; names and units in learner/algorithms/diagnostics.py."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The weights by Hugging Face name, where they lie; `find_holders` says who has which."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of all of them."""
    here: Mapping[str, Tensor]
    """Views of those that this rank has whole, their elements in order."""
    rest: Callable[[], Iterator[tuple[str, Tensor]]]
    """Gathers the others from all ranks, one after another, each good until the next."""


class Trainer:
    """A model and its optimizer on this rank. `learner.parallel.init_world` comes first."""

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
        self._parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        self._holders: Holders | None = None
        self._exported: Exported | None = None
        self._places: list[int] = []
        """Where the parameters lay when `_exported` was made."""
        self._read: torch.cuda.Event | None = None
        """Until when no weight may change."""
        self.ddp = _data_parallel(self.chunks, parallel)
        self.frozen = FrozenPolicies(self.chunks, self.settle_parameters)
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
        self.not_finite_in_a_row = 0
        """Updates skipped since the last whose loss and gradient were finite."""

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: Loss | Objective,
        *,
        temperature: float,
        policy_version: int,
    ) -> StepResult:
        """Update the weights once, on the mean loss over the trained tokens of all ranks and micro-batches.

        Args:
            micro_batches: those of this data-parallel rank; equal on the ranks that share a model with it.
            loss: which loss to compute; one that wants other policies' log-probs finds them in the
                micro-batches.
            temperature: at which the tokens were sampled; 1 for SFT.
            policy_version: of the weights before the update, to tell fresh tokens from stale ones.
        """
        lr = learning_rate(self.optimizer_config, self.updates_done + 1)
        configure_optimizer(self.optimizer, self.optimizer_config, lr)
        objective = loss if isinstance(loss, Objective) else Objective(loss)
        names, totals = self._accumulate_gradients(micro_batches, objective, temperature, policy_version)
        sums, norm = self._update(names, totals)
        tokens = int(sums["trained_tokens"])
        mean_loss = sums["loss"] / max(tokens, 1)
        updated = tokens > 0 and math.isfinite(mean_loss) and math.isfinite(norm)
        self.steps_done += 1
        self.updates_done += updated
        self._refuse_endless_skipping(mean_loss, norm)
        return StepResult(
            loss=mean_loss,
            grad_norm=norm,
            lr=lr,
            tokens=tokens,
            skipped=not updated,
            diagnostics=_diagnostics(sums, tokens),
        )

    def _update(self, names: list[str], totals: Tensor) -> tuple[dict[str, float], float]:
        """Update where the loss and the gradient allow it: the sums and the gradient's norm, as numbers.

        The device decides by itself, so that the host waits once, when everything has been put to work.
        """
        loss, tokens = self._loss_and_tokens(names, totals)
        divisor = tokens.clamp(min=1)
        norm = gradient_norm(self.optimizer) / divisor
        clipped = ((norm + CLIP_EPS) / self.optimizer_config.clip_grad).clamp(min=1)
        updated = (tokens > 0) & torch.isfinite(loss) & torch.isfinite(norm)
        self._await_readers()
        update(self.optimizer, divisor=(divisor * clipped).float(), skip=1.0 - updated.float())
        if self.parallel.pipeline > 1:
            names, totals = from_last_stage((names, totals.cpu()))
        *values, norm_value = torch.cat((totals, norm[None].to(totals.device))).tolist()
        return dict(zip(names, values, strict=True)), norm_value

    def _loss_and_tokens(self, names: list[str], totals: Tensor) -> Tensor:
        """Loss and trained tokens of all ranks, float64 [2] on the device, until now the last stage's."""
        values = torch.zeros(2, dtype=torch.float64, device=device())
        if names:
            torch.stack([totals[names.index(name)] for name in ("loss", "trained_tokens")], out=values)
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

    def export(self) -> dict[str, Tensor]:
        """Return copies of the weights by Hugging Face name, on rank 0; nothing on the others.

        Every rank calls this.
        """
        return {name: part.clone(memory_format=torch.contiguous_format) for name, part in self.stream()}

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights one after another on rank 0, each good until the next; every rank exhausts it."""
        self.settle_parameters()
        self._holders = self._holders or find_holders(self.chunks)
        yield from stream_hf_weights(self.chunks, self.hf_config, self._holders)

    def exported(self) -> Exported:
        """The weights as rank 0 has them, to copy them at once; every other rank exhausts `stream`."""
        self.settle_parameters()
        places = [parameter.data_ptr() for parameter in self._parameters]
        if self._exported is None or self._places != places:
            holders = self._holders = self._holders or find_holders(self.chunks)
            here = whole_on_rank_0(self.chunks, self.hf_config, holders)
            shapes = exported_shapes(self.hf_config, holders)
            rest = partial(stream_hf_weights, self.chunks, self.hf_config, holders, without=here)
            if len(here) == len(shapes):
                rest = partial(iter, ())  # nobody sends any
            self._exported, self._places = Exported(shapes, here, rest), places
        return self._exported

    @property
    def alone_on_cpu(self) -> bool:
        """Whether no other rank and no device takes part in what this one does."""
        return device().type == "cpu" and dist.get_world_size() == 1

    @property
    def size_bytes(self) -> int:
        """Of the weights on this rank."""
        return sum(parameter.nbytes for parameter in self._parameters)

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

    @property
    def model(self) -> PolicyModel:
        """The model, where this rank has all of it."""
        [model] = self.chunks
        return model

    def _accumulate_gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        temperature: float,
        policy_version: int,
    ) -> tuple[list[str], Tensor]:
        take_room(self.ddp)
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        shares = self.shares(micro_batches)
        per_micro_batch = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, objective, temperature, policy_version),
            data_iterator=[iter(shares) for _ in self.ddp],
            model=self.ddp,
            num_microbatches=len(shares),
            seq_length=len(shares[0].tokens),
            micro_batch_size=1,
        )
        return _sum_over_ranks(per_micro_batch) if per_micro_batch else ([], torch.empty(0))

    def shares(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """This rank's share of each micro-batch, then as many idle ones as the schedule needs."""
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


def _data_parallel(chunks: Sequence[PolicyModel], parallel: ParallelConfig) -> list[DistributedDataParallel]:
    config = chunks[0].config
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        grad_reduce_in_fp32=True,
    )
    wrapped = [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, LINEAR):
            module.gradient_accumulation_fusion = True  # now that their weights have a place for the sum
    config.finalize_model_grads_func = _finalize_gradients
    if parallel.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def _finalize_gradients(
    chunks: list[DistributedDataParallel], _tokens: Tensor | None, **settings: object
) -> None:
    """Megatron-core's, but for dividing by the tokens, which the update does in passing."""
    finalize_model_grads(chunks, None, **settings)


def _forward_step(
    objective: Objective,
    temperature: float,
    policy_version: int,
    batches: Iterator[MicroBatch],
    model: DistributedDataParallel,
) -> tuple[object, object]:
    """Megatron-core's protocol: the model's output, and a function from it to (loss sum, tokens, sums)."""
    batch = next(batches)
    tokens = TrainedTokens.of(batch)

    def token_loss(logprobs: Tensor, _entropy: Tensor, rows: slice) -> Tensor:
        return compute_loss(objective, logprobs, tokens[rows])[0]

    return model(batch, temperature, token_loss), partial(_loss_step, objective, policy_version, tokens)


def _loss_step(
    objective: Objective, policy_version: int, tokens: TrainedTokens, output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Sums]:
    loss_sum, logprobs, entropy = output
    loss = objective.loss
    _, sums = compute_loss(objective, logprobs, tokens)
    count = tokens.loss_mask.sum(dtype=torch.int)
    sums |= {"loss": loss_sum.detach(), "trained_tokens": count, "entropy": entropy.sum()}
    if not isinstance(loss, SFTLoss):
        sums |= off_policy_sums(
            logprobs,
            tokens.behaviour_logprobs,
            tokens.advantages,
            tokens.policy_versions,
            tokens.loss_mask,
            policy_version=policy_version,
            truncation_cap=math.inf if loss.truncation_cap is None else loss.truncation_cap,
        )
    return loss_sum, count, sums


def _sum_over_ranks(per_micro_batch: Sequence[Sums]) -> tuple[list[str], Tensor]:
    """Add up over micro-batches and data-parallel ranks, in float64 and one collective: names and sums."""
    names = list(per_micro_batch[0])
    stacked = torch.stack([torch.stack([sums[name].double() for name in names]) for sums in per_micro_batch])
    return names, data_parallel_sum(stacked.sum(0))


def _diagnostics(sums: Mapping[str, float], tokens: int) -> dict[str, float]:
    if tokens == 0:
        return {}
    means = {"entropy_nats": sums["entropy"] / tokens}
    if "clipped_tokens" in sums:
        means["clipped_fraction"] = sums["clipped_tokens"] / tokens
    means |= {f"{name}_nats": sums[name] / tokens for name in DISTANCES if name in sums}
    return means | (off_policy_diagnostics(sums) if "ratio" in sums else {})
