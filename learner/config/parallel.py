"""How the ranks of the learner's world share a model, and where they run. Loads without torch."""

from typing import Literal, Self

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
