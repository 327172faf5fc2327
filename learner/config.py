"""Configuration of the learner's numerics; loads without torch."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config
from learner.frozen_config import NO_REFERENCE, NO_TEACHER, ReferenceConfig, TeacherConfig
from learner.schedule_config import ConstantSchedule, ScheduleConfig
from storage.transport_config import BusTransport, TransportConfig


class ParallelConfig(Config):
    """How the ranks of the learner's world share a model; what is left over is data parallel.

    The world has a multiple of `tensor * context * pipeline` ranks; docs/parallelism.md says which to choose.
    """

    tensor: int = Field(1, ge=1)
    """Ranks that share each layer: its heads, its MLP and the vocabulary."""

    sequence: bool = False
    """Between the layers, these ranks share the tokens too."""

    pipeline: int = Field(1, ge=1)
    """Ranks that share the layers, one after another."""

    virtual_pipeline: int = Field(1, ge=1)
    """Pieces that each pipeline rank's layers are cut into: more is less idle time, and more messages."""

    context: int = Field(1, ge=1)
    """Ranks that share the tokens of each sequence."""

    expert: int = Field(1, ge=1)
    """Ranks that share the experts of a mixture; taken from those that are data parallel elsewhere."""

    expert_tensor: int = Field(1, ge=1)
    """Ranks that share each expert."""

    distributed_optimizer: bool = True
    """Data-parallel ranks share the optimizer's state instead of each holding all of it."""

    overlap_grad_reduce: bool = False
    """Gradients are added up over the data-parallel ranks while the backward pass goes on."""

    overlap_param_gather: bool = False
    """Updated parameters are gathered while the next forward pass goes on."""

    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again to save memory: attention alone, or every layer."""

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence=true needs tensor > 1: its ranks share the tokens")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(f"virtual_pipeline={self.virtual_pipeline} needs pipeline > 1")
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "overlap_param_gather=true needs distributed_optimizer=true and overlap_grad_reduce=true"
            )
        return self


UNDIVIDED = ParallelConfig()
"""Every rank has the whole model."""


class OptimizerConfig(Config):
    """AdamW with warm-up, then a schedule."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate after warm-up, the highest."""

    schedule: ScheduleConfig = ConstantSchedule()
    """What the learning rate does after warm-up; counts updates, not skipped steps."""

    warmup_steps: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly; update u of w runs at lr * u / w."""

    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of the gradient."""

    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the mean of the squared gradient."""

    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""

    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay; biases and norm weights are exempt."""

    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the two moments between updates; bfloat16 takes half the memory, the update itself is float32."""

    offload: float = Field(0.0, ge=0, le=1)
    """Part of the main weights and moments that lies in the host's memory and is updated there, by
    `learner.threads` threads."""

    clip_grad: float = Field(1.0, gt=0)
    """Upper bound on the global gradient norm; `inf` turns clipping off."""

    max_skipped_in_a_row: int = Field(10, ge=1)
    """Updates whose loss or gradient is not finite are skipped; so many one after another end the run."""

    @model_validator(mode="after")
    def _moments_can_move(self) -> Self:
        if self.state_dtype == "bfloat16" and self.beta2 > 0.99:
            raise ValueError(
                f"state_dtype=bfloat16 needs beta2 <= 0.99 (it is {self.beta2}): bfloat16 has 8 bits, so "
                "rounding swallows the small changes of a slower mean"
            )
        return self

    @model_validator(mode="after")
    def _offloaded_moments_are_float32(self) -> Self:
        if self.offload and self.state_dtype != "float32":
            raise ValueError(
                f"offload={self.offload} needs state_dtype=float32: it is {self.state_dtype}, which saves "
                "memory of the device"
            )
        return self

    @model_validator(mode="after")
    def _schedule_falls(self) -> Self:
        lowest = 0.0 if isinstance(self.schedule, ConstantSchedule) else self.schedule.min_lr
        if lowest > self.lr:
            raise ValueError(f"schedule.min_lr={lowest} is above lr={self.lr}: the schedule goes down")
        return self


class TISLoss(Config):
    """Token-level REINFORCE with a truncated importance ratio."""

    type: Literal["tis"] = "tis"
    """Name of the loss."""

    truncation_cap: float = Field(2.0, gt=0)
    """Upper bound on the importance ratio to the behaviour policy; `inf` turns truncation off."""


class PPOClipLoss(Config):
    """PPO's clipped surrogate."""

    type: Literal["ppo_clip"] = "ppo_clip"
    """Name of the loss."""

    centre: Literal["behaviour", "proximal"] = "behaviour"
    """Centre of the clip: the policy that sampled the token, or, decoupled (arXiv:2505.24298), the policy
    before the step, whose log-probs take a pass of their own. The latter is for `batch.updates` above 1: in
    the first update the policy is still at the centre."""

    clip_eps: float = Field(0.2, gt=0)
    """How far below 1 the importance ratio may fall before its gradient stops."""

    clip_eps_high: float | None = Field(None, gt=0)
    """How far above 1 it may rise; `None` means `clip_eps`."""

    truncation_cap: float = Field(2.0, gt=0)
    """Upper bound on the importance ratio to the behaviour policy; `inf` turns truncation off."""


class SFTLoss(Config):
    """Supervised fine-tuning: negative log-likelihood of the tokens under the mask."""

    type: Literal["sft"] = "sft"
    """Name of the loss."""


LossConfig = Annotated[TISLoss | PPOClipLoss, Field(discriminator="type")]


class GRPOAdvantage(Config):
    """Reward relative to its group."""

    type: Literal["grpo"] = "grpo"
    """Name of the estimator."""

    normalize_std: bool = True
    """Divide by the group's standard deviation; `False` is Dr. GRPO."""

    std_floor: float = Field(1e-4, ge=0)
    """Added to the standard deviation before the division."""


AdvantageConfig = GRPOAdvantage
"""A union discriminated on `type` as soon as there is a second estimator."""


class BatchConfig(Config):
    """How trajectories become micro-batches."""

    tokens_per_micro_batch: int = Field(16384, gt=0)
    """Token budget of one packed micro-batch."""

    logprob_tokens_per_micro_batch: int | None = Field(None, gt=0)
    """Token budget of a micro-batch in passes that only take log-probs (proximal, reference, teacher), which
    keep no activations: several times as much fits; `None` means `tokens_per_micro_batch`."""

    updates: int = Field(1, ge=1)
    """Updates that share a batch, each on as many trajectories of every group: at most as many as
    `admission.samples_per_prompt`."""

    oversized: Literal["alone", "refuse"] = "alone"
    """A trajectory longer than the budget is a micro-batch by itself, or ends the run with its name."""

    balance: Literal["tokens", "flops"] = "tokens"
    """What data-parallel ranks get an equal share of; FLOPs count that attention grows with the square."""


class WorldConfig(Config):
    """The learner's processes, which torchrun's elastic agent starts: one on each host."""

    processes: int = Field(1, ge=1)
    """Ranks on each host, one for each of its GPUs. With one altogether there is no agent."""

    nodes: int = Field(1, ge=1)
    """Hosts; each runs `launch learner` and shares the run's directory."""

    node_rank: int | None = Field(None, ge=0)
    """Which of them this one is, from 0; ranks are counted in this order."""

    master: str | None = None
    """host:port of node 0, where the others find it."""

    join_timeout_s: int = Field(600, gt=0)
    """How long a host waits for the others."""

    restarts: int = Field(10, ge=0)
    """How often a world in which a rank died starts again from the last checkpoint."""


class CheckpointConfig(Config):
    """When the learner's state is saved, and how much of it is kept."""

    save_every: int = Field(50, gt=0)
    """Steps between checkpoints."""

    keep: int = Field(2, gt=0)
    """Newest checkpoints that pruning leaves."""


class ScratchModel(Config):
    """A small random Qwen3 with one token per character, for runs without a model of their own."""

    hidden_size: int = Field(128, gt=0)
    """Width of the residual stream."""

    layers: int = Field(2, gt=0)
    """Transformer blocks."""

    heads: int = Field(4, gt=0)
    """Query heads; the head dimension is `hidden_size / heads`."""

    kv_heads: int = Field(2, gt=0)
    """Key and value heads."""

    intermediate_size: int = Field(256, gt=0)
    """Width of the gated MLP."""

    context: int = Field(128, gt=0)
    """Longest sequence, prompt and response together."""


class ModelConfig(Config):
    """The policy that training starts from."""

    path: Path | None = None
    """Hugging Face model directory with its tokenizer. Without it a scratch model is made."""

    scratch: ScratchModel = ScratchModel()
    """Sizes of the scratch model."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameters and activations of the learner; the optimizer's main weights are float32."""

    freeze: tuple[str, ...] = ()
    """Regular expressions, searched in Hugging Face names: these weights stay as they are."""

    train_only: tuple[str, ...] = ()
    """Regular expressions, searched in Hugging Face names: all other weights stay as they are."""


class WarmupOptimizerConfig(OptimizerConfig):
    """AdamW of the supervised stage."""

    lr: float = Field(2e-3, gt=0)
    """Learning rate after its own warm-up."""

    warmup_steps: int = Field(20, ge=0)
    """Updates over which the learning rate rises linearly."""


class WarmupConfig(Config):
    """Supervised fine-tuning before reinforcement learning, on demonstrations."""

    demonstrations: Path | None = None
    """JSONL of {"prompt": ..., "response": ...}. Without it the task's generator writes one."""

    steps: int = Field(0, ge=0)
    """Optimizer steps; 0 leaves the stage out."""

    batch_size: int = Field(64, gt=0)
    """Demonstrations in a step."""

    threads: int = Field(1, ge=1)
    """CPU threads of this stage, in which the actors are idle."""

    optimizer: WarmupOptimizerConfig = WarmupOptimizerConfig()
    """Its own optimizer; the next stage starts with a fresh one."""


class PublicationConfig(Config):
    """How policy versions reach the actors; docs/weights.md says which transport to choose."""

    anchor_every: int = Field(10, ge=1, le=1000)
    """Versions between two whole snapshots, from which late joiners start; what lies between travels as
    deltas. 1 sends every version whole."""

    keep: int = Field(8, ge=2)
    """Versions that can still be fetched; those still to be evaluated stay besides."""

    threads: int | None = Field(None, ge=1)
    """CPU threads that compare, compress and hash, and copy what is broadcast, beside training; without it
    half of the cores, 32 at most."""

    broadcast_timeout_s: float = Field(120.0, gt=0)
    """How long an engine with `update = "group"` may take to join the learner's group, and to take a version,
    before it is left to fetch that by the transport."""

    broadcast_device_bytes: int = Field(0, ge=0)
    """Memory of rank 0's GPU, for each engine on CUDA with `update = "group"`: weights lie there before the
    engine stands still, and need not cross PCIe then. Training has so much less, so grant what its largest
    step leaves free; more than the published weights (and a few MB) is not taken."""

    transport: TransportConfig = BusTransport()
    """The way that the bytes take; what is announced goes over the bus."""


class LearnerConfig(Config):
    """Reinforcement learning."""

    steps: int = Field(1000, gt=0)
    """Optimizer steps at most."""

    target_accuracy: float | None = Field(None, gt=0, le=1)
    """Stop once the held-out sampled accuracy reaches this."""

    threads: int = Field(1, ge=1)
    """CPU threads of the learner."""

    loss: LossConfig = TISLoss()
    """Objective and its off-policy correction."""

    advantage: AdvantageConfig = GRPOAdvantage()
    """How rewards become advantages."""

    reference: ReferenceConfig = NO_REFERENCE
    """A policy to stay near to."""

    teacher: TeacherConfig = NO_TEACHER
    """A policy to learn from."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW of this stage."""

    world: WorldConfig = WorldConfig()
    """How many processes, and where."""

    parallel: ParallelConfig = UNDIVIDED
    """How the ranks of a torchrun world share the model."""

    batch: BatchConfig = BatchConfig()
    """Packing."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""

    read: Literal["auto", "bus"] = "auto"
    """How trajectories come from their shards: `auto` maps the files of those on the same host and asks the
    others over the bus, `bus` asks all."""

    publish_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Published weights: what the engines compute with."""

    publication: PublicationConfig = PublicationConfig()
    """Versions on their way to the actors."""
