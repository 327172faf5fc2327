"""Configuration of the learner's numerics; loads without torch."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config


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
    """AdamW with warm-up, then a constant learning rate."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate after warm-up."""

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

    clip_grad: float = Field(1.0, gt=0)
    """Upper bound on the global gradient norm; `inf` turns clipping off."""


class TISLoss(Config):
    """Token-level REINFORCE with a truncated importance ratio."""

    type: Literal["tis"] = "tis"
    """Name of the loss."""

    truncation_cap: float = Field(2.0, gt=0)
    """Upper bound on the importance ratio to the behaviour policy; `inf` turns truncation off."""


class PPOClipLoss(Config):
    """PPO's clipped surrogate, centred on the behaviour policy."""

    type: Literal["ppo_clip"] = "ppo_clip"
    """Name of the loss."""

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
    """Token budget of one packed micro-batch; a longer trajectory is one by itself."""


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

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW of this stage."""

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

    keep_versions: int = Field(8, ge=2)
    """Published versions that stay on the bus; those still to be evaluated stay besides."""
