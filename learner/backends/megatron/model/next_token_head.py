"""The head for the token after the next (MTP, arXiv:2412.19437, section 2.2), with which engines draft."""

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import HEAD
from learner.backends.megatron.core.layout import padded_vocabulary
from learner.backends.megatron.core.megatron_core import (
    MegatronModule,
    ProcessGroupCollection,
    TransformerConfig,
    build_module,
    parallel_state,
    tensor_parallel,
)
from learner.backends.megatron.model.attention.attention import PackedLayout
from learner.backends.megatron.model.attention.latent_attention import WholeLinear
from learner.backends.megatron.model.attention.norm import RMSNorm
from learner.backends.megatron.model.layers import head_layer_spec
from learner.backends.megatron.model.model import PolicyModel, mark_cut_weights, shared_experts_unwarned
from learner.distributed.process_group import device


class EmbeddingCopy:
    """This rank's part of it: the embedding on the first stage, its copy on the last, nothing in between."""

    def __init__(
        self, chunks: Sequence[PolicyModel], config: TransformerConfig, hf_config: PretrainedConfig
    ) -> None:
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


class AbsentHead(MegatronModule):  # type: ignore[misc]  # megatron-core is untyped
    """Stands for the head on a stage of a pipeline that does not have it: megatron-core builds, steps and
    saves optimizers on all ranks alike, and none without a parameter."""

    weight_prefix = HEAD

    def __init__(self, config: TransformerConfig, stage: int) -> None:
        super().__init__(config)
        self.pre_process = self.share_embeddings_and_output_weights = False
        self.register_parameter(
            f"stage_{stage}", torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        )


class NextTokenHead(MegatronModule):  # type: ignore[misc]  # megatron-core is untyped
    """One layer that makes of a token's hidden state, and of the token after it, what the output layer reads
    the token after that from. Embedding and output layer are the model's."""

    weight_prefix = HEAD
    """Begins the names of its weights in the whole model."""

    def __init__(self, config: TransformerConfig, hf_config: PretrainedConfig) -> None:
        super().__init__(config)
        # megatron-core looks here for an embedding whose gradient stages would share
        self.pre_process = self.share_embeddings_and_output_weights = False
        hidden, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm, self.hnorm = RMSNorm(config, hidden, eps), RMSNorm(config, hidden, eps)
        self.eh_proj = WholeLinear(config, 2 * hidden, hidden)
        with shared_experts_unwarned():
            self.transformer_layer = build_module(
                head_layer_spec(config, hf_config),
                config=config,
                layer_number=config.num_layers + 1,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            )
        self.final_layernorm = RMSNorm(config, hidden, eps)
        mark_cut_weights(self)

    def forward(self, embedded: Tensor, hidden: Tensor, layout: PackedLayout) -> Tensor:
        """Return what the output layer reads [T, 1, H].

        Args:
            embedded: [T, 1, H], of the token after each.
            hidden: [T, 1, H], of each token, behind the model's final norm.
            layout: of the sequences in the pack; no query sees another sequence."""
        joined, _ = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        layout = copy.copy(layout)
        layout.experts = None  # those of the model's own layers
        found, _ = self.transformer_layer(hidden_states=joined, attention_mask=None, packed_seq_params=layout)
        return self.final_layernorm(found)  # type: ignore[no-any-return]
