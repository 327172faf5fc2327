"""Tells how the ranks of the learner's world share a model, and where they run. Loads without torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from bus.config import Config
from bus.errors import ConfigError


class ParallelConfig(Config):
    """Sets how the ranks of the learner's world share a model; the remaining factor is data parallel.

    The world has a multiple of `tensor * context * pipeline` ranks; docs/parallelism.md says which to choose.
    """

    tensor: int = Field(1, ge=1)
    """Ranks that share each layer: its heads, its MLP and the vocabulary."""
    sequence: bool = False
    """Sets whether the tensor ranks also share the tokens between the layers."""
    overlap_exchanges: bool = False
    """Sets whether tokens travel between the ranks that share them while layers multiply."""
    pipeline: int = Field(1, ge=1)
    """Ranks that share the layers, one after another."""
    virtual_pipeline: int = Field(1, ge=1)
    """Stages that each pipeline rank has; more of them mean less idle time and more messages."""
    context: int = Field(1, ge=1)
    """Ranks that share the tokens of each sequence."""
    context_min_tokens: int = Field(0, ge=0)
    """Sequences of fewer tokens stay whole on one of the `context` ranks, as far as these get equal shares of
    a micro-batch; 0 cuts every sequence."""
    context_attention: Literal["gather", "ring"] = "gather"
    """Sets how queries reach the keys of other `context` ranks: those of all ranks are gathered in each
    layer, or pass by, one rank's while the last one's are computed with, so that two are held at most."""
    expert: int = Field(1, ge=1)
    """Ranks that share the experts of a mixture; taken from those that are data parallel elsewhere."""
    expert_tensor: int = Field(1, ge=1)
    """Ranks that share each expert."""
    distributed_optimizer: bool = True
    """Sets whether data-parallel ranks share the optimizer's state instead of each holding all of it."""
    overlap_grad_reduce: bool = False
    """Sets whether gradients are summed over the data-parallel ranks during the backward pass."""
    overlap_param_gather: bool = False
    """Sets whether updated parameters are gathered during the next forward pass."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Sets what the backward pass computes again to save memory: nothing, attention alone, or every layer."""

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence=true needs tensor > 1: its ranks share the tokens")
        if self.overlap_exchanges and not self.sequence:
            raise ValueError("overlap_exchanges=true needs sequence=true: others exchange no tokens")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(f"virtual_pipeline={self.virtual_pipeline} needs pipeline > 1")
        if self.context_attention == "ring" and self.context == 1:
            raise ValueError("context_attention=ring needs context > 1")
        if self.context_min_tokens and self.context == 1:
            raise ValueError(f"context_min_tokens={self.context_min_tokens} needs context > 1")
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "overlap_param_gather=true needs distributed_optimizer=true and overlap_grad_reduce=true"
            )
        return self


UNDIVIDED = ParallelConfig()
"""Every rank has the whole model."""


class WorldConfig(Config):
    """The learner's processes. Torchrun's elastic agent starts them, one agent on each host."""

    processes: int = Field(1, ge=1)
    """Ranks on each host, one for each of its GPUs. A world of one rank has no agent."""
    nodes: int = Field(1, ge=1)
    """Number of hosts. Each runs `launch learner`, and all share the run's directory."""
    node_rank: int | None = Field(None, ge=0)
    """Number of this host, from 0; ranks are counted in this order."""
    master: str | None = None
    """Address of node 0 and a free port there, as host:port, where the other hosts find it."""
    join_timeout_s: int = Field(600, gt=0)
    """Sets how long a host waits for the others."""
    collective_timeout_s: float = Field(1800.0, ge=10)
    """Longest time that a rank waits for the others in one collective operation, such as the sum of
    gradients; then the world is started again. Ranks may read a checkpoint at different speeds."""
    restarts: int = Field(10, ge=0)
    """Most restarts of the world, each from the latest checkpoint after a rank died."""


def refuse_world(parallel: ParallelConfig, ranks: int) -> None:
    """Raise `ConfigError` when a world of so many ranks cannot be divided this way."""
    dense = parallel.tensor * parallel.context * parallel.pipeline
    sparse = parallel.expert_tensor * parallel.expert * parallel.pipeline
    for name, size in (("tensor * context * pipeline", dense), ("expert_tensor * expert * pipeline", sparse)):
        if ranks % size:
            raise ConfigError(
                f"learner.parallel: {name} = {size} does not divide the world of {ranks} ranks: "
                f"start a multiple of {size} of them, or choose a smaller layout"
            )
