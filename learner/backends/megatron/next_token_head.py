"""Training of the head for the token after the next, beside the policy and without a trace in it.

The head reads what the policy has computed, and no gradient leaves it: each micro-batch passes through it
forwards and backwards as soon as the policy's hidden states are there, which frees its activations at once.
Its gradients, its norm and its optimizer are its own, so that the policy's update is that of a run without a
head, to the bit (THUDM/slime trains both in one optimizer, where the gradient of the head enters the norm by
which that of the policy is clipped).

A position counts where the two tokens after it are trained ones, as those that an engine drafts are."""

import copy
from collections.abc import Collection, Sequence, Set
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import HEAD, Rule
from learner.backends.megatron.conversion.families import family_of, shape_of
from learner.backends.megatron.core.ddp import (
    data_parallel,
    finalize_gradients,
    release_gradients,
    restore_gradients,
)
from learner.backends.megatron.core.layout import padded_vocabulary
from learner.backends.megatron.core.megatron_core import (
    MegatronModule,
    ProcessGroupCollection,
    TransformerConfig,
    build_module,
    parallel_state,
    tensor_parallel,
)
from learner.backends.megatron.core.process_groups import data_parallel_sum
from learner.backends.megatron.model.attention.attention import PackedLayout
from learner.backends.megatron.model.attention.latent_attention import WholeLinear
from learner.backends.megatron.model.attention.norm import RMSNorm
from learner.backends.megatron.model.layers import head_layer_spec
from learner.backends.megatron.model.model import (
    PolicyModel,
    mark_cut_weights,
    shared_experts_unwarned,
    transformer_config,
)
from learner.backends.megatron.optimizer.optimizer import (
    build_optimizer,
    configure_optimizer,
    give_up_optimizer,
)
from learner.backends.megatron.update_step import update_if_finite
from learner.backends.megatron.weights.frozen_weights import refuse_idle_ranks
from learner.backends.megatron.weights.rank_weights import global_name, load_hf_weights
from learner.backends.output.head_output import head_loss
from learner.backends.output.policy_output import chunk_rows
from learner.config.mtp import OWN_EMBEDDING, Heads, MtpConfig, refuse_headless
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import MicroBatch
from learner.data.streams import STREAMS
from learner.distributed.process_group import device
from learner.model_directories.lazy_weights import SomeWeights, State
from storage.model_files.families import family_named


class EmbeddingCopy:
    """This rank's part of the embedding: the layer on the first stage, its copy on the last, else nothing."""

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
        """Send the embedding to the last stage. Every rank calls this, when the parameters are gathered."""
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
        layout.experts = None  # experts are given to the model's own layers
        found, _ = self.transformer_layer(hidden_states=joined, attention_mask=None, packed_seq_params=layout)
        return self.final_layernorm(found)  # type: ignore[no-any-return]


FOLLOWING = "following_tokens"
OF_ONE_STAGE = {
    "pipeline": 1, "virtual_pipeline": 1, "overlap_grad_reduce": False, "overlap_param_gather": False
}  # fmt: skip
"""Settings of the head's layout: its gradients are added up after the last micro-batch of a step, and its
weights gathered at once."""
SUMS = ["loss", "trained_tokens", "denominator", "nats", "correct"]
"""Names of the sums of an update, the first three as `update_if_finite` reads them."""


def head_rules(config: MtpConfig, hf_config: PretrainedConfig, names: Collection[str]) -> list[Rule]:
    """Return the rules of the head that is trained; none where none is. `names` are those of all weights.
    Raises `ConfigError` for a model without a head that could be trained."""
    if not config.exists:
        return []
    counted_in = family_named(hf_config.model_type).heads_counted_in
    fields = ("model_type", "num_hidden_layers", OWN_EMBEDDING, counted_in or "num_nextn_predict_layers")
    described = {field: getattr(hf_config, field) for field in fields if hasattr(hf_config, field)}
    refuse_headless(config, Heads.of(described, names))
    return list(family_of(hf_config).head(shape_of(hf_config)))


def with_following_tokens(batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch with what the head is to predict: the token after each label, where both are
    trained."""
    both = batch.loss_mask & batch.loss_mask.roll(-1)  # False at the end of each sequence, and of the pack
    following = torch.where(both, batch.labels.roll(-1), STREAMS[FOLLOWING].fill)
    return replace(batch, streams={**batch.streams, FOLLOWING: following.to(STREAMS[FOLLOWING].dtype)})


class TrainedHead:
    """The head on this rank, with an optimizer of its own. The policy is built before."""

    def __init__(
        self, config: MtpConfig, policy: Sequence[PolicyModel], hf_config: PretrainedConfig, state: State,
        rules: Sequence[Rule], *, frozen: Set[str], dtype: torch.dtype, parallel: ParallelConfig,
    ) -> None:  # fmt: skip
        """Build the head and load its weights, on the last stage of a pipeline. Raises `ConfigError` for
        weights that are missing or of another shape, and where none is trained."""
        self._config, self._hf_config, self._dtype = config, hf_config, dtype
        self.stages = parallel.pipeline
        self.frozen_names = {rule.megatron for rule in rules} & frozen
        """Names in megatron-core of the head's weights that settings freeze."""
        alone = parallel.model_copy(update=OF_ONE_STAGE)
        settings = transformer_config(hf_config, dtype, alone)
        self._is_here = policy[-1].post_process
        self._embedding = EmbeddingCopy(policy, settings, hf_config) if self.stages > 1 else None
        stage = parallel_state.get_pipeline_model_parallel_rank()
        head = NextTokenHead(settings, hf_config) if self._is_here else AbsentHead(settings, stage)
        self.head = head.to(device())
        self.chunks = [self.head]
        names = [part for rule in rules for part in rule.parts]
        load_hf_weights(
            self.chunks, hf_config, SomeWeights(state, [n for n in names if n in state]), head=rules
        )
        for name, parameter in self.head.named_parameters():
            parameter.requires_grad = parameter.requires_grad and global_name(self.head, name) not in frozen
        chosen = "model.freeze and model.train_only"
        refuse_idle_ranks(self.chunks, chosen, "set learner.mtp.weight=0 to leave the head as it is")
        self.ddp = data_parallel(self.chunks, alone)
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device())

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Start over with a fresh AdamW of these settings, whatever trains the policy's matrices."""
        own = {"matrices": "adamw", "offload": 0.0, "offload_directory": None}
        config = config.model_copy(update=own)
        give_up_optimizer(self)
        self.optimizer = build_optimizer(config, self.ddp, self._hf_config, self._dtype)

    def begin(self) -> None:
        """Begin an update: forget the gradients of the last, and take over the embedding as it is now. Every
        rank calls this, when the policy's parameters are gathered."""
        restore_gradients(self.ddp)
        self.ddp[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        self._sums.zero_()
        if self._embedding is not None:
            self._embedding.renew()

    def learn(self, batch: MicroBatch, hidden: Tensor, layout: PackedLayout, model: PolicyModel) -> None:
        """Add the gradient of a micro-batch, a `HeadPass`. Every rank calls this for each of its own."""
        with torch.no_grad():
            embedded = (self._embedding or model).embedded(batch.labels)
        first_label, weight = model.output_weight()
        rows = model.of_all_tokens(self.ddp[0](embedded, hidden, layout)).index_select(0, batch.trained)
        following = batch.of_trained(FOLLOWING)
        counted = following >= 0
        found = head_loss(
            rows.detach(), weight.detach(), following - first_label, counted,
            batch.of_trained("group_weights"),
            group=model.pg_collection.tp,
            chunk_size=chunk_rows(model.output_layer.output_size_per_partition),
        )  # fmt: skip
        torch.autograd.backward([rows], [found.gradient.mul_(self._config.weight)])
        count = counted.sum()
        self._sums += torch.stack((self._config.weight * found.loss, count, count, found.loss, found.correct))

    def update(self, config: OptimizerConfig, lr: float) -> dict[str, float]:
        """Update the head on the mean loss over its tokens of all ranks; return figures of the step. An
        update whose loss or gradient is not finite is skipped, which the loss shows."""
        finalize_gradients(self.ddp)
        configure_optimizer(self.optimizer, config, lr * self._config.lr_factor)
        totals = data_parallel_sum(self._sums)
        names, totals = (SUMS, totals) if self._is_here else ([], totals[:0])
        sums, norm = update_if_finite(
            self.optimizer, config, names, totals, pipeline=self.stages, before_update=lambda: None
        )
        tokens = sums["trained_tokens"]
        if not tokens:
            return {}
        return {
            "mtp_loss_nats": sums["nats"] / tokens,
            "mtp_correct_fraction": sums["correct"] / tokens,
            "mtp_grad_norm": norm,
        }

    @property
    def size_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.head.parameters())

    def release_memory(self) -> None:
        release_gradients(self.ddp)
