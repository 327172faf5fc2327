"""The embedding of the first stage of a pipeline, on the last, where a head reads tokens that are behind."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.megatron.core.layout import padded_vocabulary
from learner.backends.megatron.core.megatron_core import TransformerConfig, parallel_state, tensor_parallel
from learner.backends.megatron.model.model import PolicyModel
from learner.distributed.process_group import device


class EmbeddingCopy:
    """This rank's part of it: the embedding on the first stage, its copy on the last, nothing in between."""

    def __init__(
        self, chunks: Sequence[PolicyModel], config: TransformerConfig, hf_config: PretrainedConfig
    ) -> None:
        """`chunks` are this rank's pieces of the policy."""
        self._layer: torch.nn.Module | None = None
        if chunks[0].pre_process:
            self._layer = chunks[0].embedding.word_embeddings
        if chunks[-1].post_process:
            self._layer = tensor_parallel.VocabParallelEmbedding(
                padded_vocabulary(hf_config.vocab_size, config.tensor_model_parallel_size),
                config.hidden_size,
                init_method=config.init_method,
                reduce_scatter_embeddings=config.sequence_parallel,
                config=config,
                tp_group=parallel_state.get_tensor_model_parallel_group(),
            ).to(device())

    def renew(self) -> None:
        """Send the embedding as it is now. Every rank calls this, when the parameters are gathered."""
        if self._layer is not None:
            group = parallel_state.get_embedding_group()
            weight = self._layer.get_parameter("weight").detach()  # elsewhere since gradients have a buffer
            dist.broadcast(weight, src=dist.get_process_group_ranks(group)[0], group=group)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return on the last stage what `PolicyModel.embedded` does on the first, without gradient."""
        assert self._layer is not None  # the last stage has one
        with torch.no_grad():
            found: Tensor = self._layer(tokens[None])
        return found if self._layer.reduce_scatter_embeddings else found.transpose(0, 1).contiguous()
