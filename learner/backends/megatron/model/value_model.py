"""Models of a policy's form with one output in place of the vocabulary's: of a critic, and of rewards."""

import copy
from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.megatron.core.megatron_core import (
    MegatronModule,
    TransformerBlockSubmodules,
    TransformerConfig,
    tensor_parallel,
)
from learner.backends.megatron.model.model import HeadPass, PolicyModel
from learner.backends.output.output_layer import TokenLoss
from learner.data.packing import MicroBatch

HEAD = "value_head."
"""Begins the names of the head's parameters in the last piece of the model."""


class ValueHead(torch.nn.Module):
    """A linear map from a hidden state to its value, with a bias; values are computed in float32."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        """Begin with values of 0, so that the first advantages are the returns themselves."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, rows: Tensor) -> Tensor:
        """Return float32 [N] of hidden states [N, H]."""
        return F.linear(rows.float(), self.weight.float(), self.bias.float())[:, 0]


class ScalarModel(PolicyModel):
    """A piece of a model with one output before each trained label."""

    def __init__(
        self,
        config: TransformerConfig,
        layers: TransformerBlockSubmodules,
        hf_config: PretrainedConfig,
        stage: int | None,
    ) -> None:
        untied = copy.copy(hf_config)
        untied.tie_word_embeddings = False  # the last stage of a pipeline needs no embedding
        super().__init__(config, layers, untied, stage)
        if self.post_process:
            del self.output_layer
            self.add_head()

    @abstractmethod
    def add_head(self) -> None:
        """Add what makes the outputs, to the last stage of a pipeline."""

    def forward(
        self, batch: MicroBatch, token_loss: TokenLoss | None = None, top: int = 0,
        head: HeadPass | None = None,
    ) -> tuple[Tensor, ...] | Tensor:  # fmt: skip
        """Return what `outputs` does; a pipeline stage before the last returns hidden states instead. There
        is no loss that could be computed with it, no token and no head for tokens."""
        hidden = self.hidden(batch)
        if not self.post_process:
            return hidden
        return self.outputs(self._of_every_token(hidden).index_select(0, batch.predicting))

    @abstractmethod
    def outputs(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return float32 outputs, [N] each, of hidden states [N, H] behind the last layer."""

    def _of_every_token(self, hidden: Tensor) -> Tensor:
        """Return [T, H] on every tensor-parallel rank. Each computes the whole gradient of it, since each has
        the whole head: nothing is added up over them."""
        if self.config.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(  # type: ignore[no-any-return]
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )[:, 0]
        return hidden[:, 0]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weights as megatron-core shards them; GPTModel's own method wants an output layer."""
        state: dict[str, Any] = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return state


class ValueModel(ScalarModel):
    """A piece of a critic's model."""

    def add_head(self) -> None:
        """Add a head whose first values are 0."""
        self.value_head = ValueHead(self.config.hidden_size, self.config.params_dtype)

    def outputs(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (self.value_head(rows),)


class ScoreModel(ScalarModel):
    """A piece of a reward model, whose head has the name that it has in files."""

    def add_head(self) -> None:
        """Add a head of random weights."""
        self.score = torch.nn.Linear(self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype)

    def outputs(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the scores in place of log-probs, and entropies of 0."""
        scores = self.score(rows).float()[:, 0]
        return scores, torch.zeros_like(scores)
