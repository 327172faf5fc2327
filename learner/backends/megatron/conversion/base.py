"""Maps Hugging Face's names and layouts of weights to megatron-core's and back, by one table of rules.

A rule names one tensor of megatron-core and the Hugging Face tensors it is made of, and says how. Tensor
parallelism belongs between the two: cut each Hugging Face part for the rank, then merge."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.shared.score_head import SCORE_HEAD, is_reward_model


@dataclass(frozen=True, kw_only=True)
class DeltaSizes:
    """Sizes of gated delta nets, which are linear attention (arXiv:2412.06464), and the layers that are one.
    Heads of keys are counted as those of queries, and each is that of as many consecutive heads of values."""

    layers: tuple[bool, ...]
    """Says which layers are delta nets; the others have attention."""
    key_heads: int
    value_heads: int
    key_width: int
    """Width of a head of queries, and of one of keys."""
    value_width: int
    taps: int
    """Tokens that the convolution before the delta rule sees, its own the last of them."""

    @property
    def values_of_key_head(self) -> int:
        """Return how many heads of values share a head of keys."""
        return self.value_heads // self.key_heads


@dataclass(frozen=True)
class HeadNames:
    """Names of what a head consists of; `{}` stands for the number of the model's layers."""

    layer: str
    """Begins the names of its layer."""
    parts: Mapping[str, str]
    """Names of what it has beside its layer, by those in megatron-core."""
    embedding: str | None = None
    """Name of the copy of the model's embedding that some files have beside it; `None` where none has."""
    output: str | None = None
    """The same of the output layer."""


BEHIND = HeadNames(
    layer="model.layers.{}.",
    parts={
        "enorm.weight": "model.layers.{}.enorm.weight",
        "hnorm.weight": "model.layers.{}.hnorm.weight",
        "eh_proj.weight": "model.layers.{}.eh_proj.weight",
        "final_layernorm.weight": "model.layers.{}.shared_head.norm.weight",
    },
    embedding="model.layers.{}.embed_tokens.weight",
    output="model.layers.{}.shared_head.head.weight",
)
"""Names of a head that is one more layer, as of DeepSeek-V3 and GLM-4.5."""
APART = HeadNames(
    layer="mtp.layers.0.",
    parts={
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "final_layernorm.weight": "mtp.norm.weight",
    },
)
"""Names of Qwen's, which are apart from the model's layers."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a model's sparse layers, and how tokens are sent to them."""

    count: int
    per_token: int
    """Number of experts that each token passes through."""
    intermediate: int
    """Width of one expert."""
    sparse_layers: tuple[bool, ...]
    """Says which layers have experts; the others have a dense MLP."""
    renormalize: bool = True
    """Says whether the weights of a token's experts are normalised to a sum of 1."""
    shared: int | None = None
    """Width of the expert that every token passes through; `None` without one."""
    shared_gate: bool = True
    """Says whether a sigmoid weighs that expert."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """What makes the weights of experts from the router's logits."""
    scale: float | None = None
    """Factor of the weights, after they are normalised."""
    choice_bias: bool = False
    """Says whether there is a bias of each expert by which experts are chosen, and not weighed. It is
    float32, and stays as it is."""
    groups: int = 1
    """Number of groups of as many consecutive experts each."""
    chosen_groups: int = 1
    """Number of groups among whose experts those of a token are chosen."""
    biased: bool = False
    """Says whether linear layers of experts and the router have a bias."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Says what an MLP makes of its two projections: `function(gate) * (up + offset)`."""

    function: Literal["swish", "gelu_tanh"] = "swish"
    """x times the sigmoid of `gain` times x, or torch's approximation of GELU."""
    gain: float = 1.0
    offset: float = 0.0
    limit: float | None = None
    """Upper bound of the gate, and of the magnitude of up; `None` is none."""


SILU = Gate()


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of attention whose keys and values are made of one narrow vector a token (arXiv:2405.04434)."""

    query_rank: int | None
    """Width of the vector that queries are made of; `None` where they are made of the hidden state."""
    rank: int
    """Width of the vector that keys without a position, and values, are made of."""
    plain: int
    """Width of the part of a query or key without a position, which comes first."""
    rotated: int
    """Width of the part that the rotary embedding turns; that of a key is the same in all heads."""
    value: int
    """Width of a value."""
    interleaved: bool
    """Says whether the rotary embedding pairs neighbours, and not the halves of that part."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model that merging and splitting need."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    tied: bool
    experts: Experts | None = None
    latent: LatentSizes | None = None
    """Sizes of attention of this kind; `None` where queries, keys and values are made of hidden states."""
    delta: DeltaSizes | None = None
    """Sizes of the layers that are delta nets; `None` where none is."""
    joint_norms: bool = False
    """Says that all queries of a token are normed together, and so are its keys."""
    scores: bool = False
    """Says that a scalar head stands in place of the output layer."""

    @property
    def delta_layers(self) -> tuple[bool, ...]:
        return (False,) * self.layers if self.delta is None else self.delta.layers

    @classmethod
    def of(cls, hf_config: PretrainedConfig) -> "Shape":
        """Read what is common to all families from a transformers configuration; `Family.shape` reads all."""
        heads = hf_config.num_attention_heads
        return cls(
            layers=hf_config.num_hidden_layers,
            hidden=hf_config.hidden_size,
            # A configuration whose layers all have experts may not say how wide others would be.
            intermediate=getattr(hf_config, "intermediate_size", None) or hf_config.moe_intermediate_size,
            heads=heads,
            groups=hf_config.num_key_value_heads or heads,
            head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
            vocab=hf_config.vocab_size,
            tied=hf_config.tie_word_embeddings,
            scores=is_reward_model(hf_config),
        )


@dataclass(frozen=True)
class Layout:
    """Says how Hugging Face's parts become one tensor and back."""

    merge: Callable[[Sequence[Tensor], Shape], Tensor]
    split: Callable[[Tensor, Shape], Sequence[Tensor]]
    """Returns views of the parts with their elements in order, or copies of parts that are scattered;
    `part_shapes` has their shapes."""
    part_shapes: Callable[[tuple[int, ...], Shape], Sequence[tuple[int, ...]]]
    """Returns the shapes of the parts from the shape of the whole."""
    by_group: bool = False
    """Says whether the whole has the rows of one key-value head after those of another."""
    scattered: bool = False
    """Says whether the rows of a part lie in several places of the whole, so that `split` must copy them."""

    def mixes(self, shape: Shape, ranks: int) -> bool:
        """Tell whether slices for so many ranks have rows of several parts in places of their own: parts are
        scattered, or there are fewer key-value heads than ranks, which share the rows of each."""
        return self.scattered or (self.by_group and shape.groups < ranks)


@dataclass(frozen=True)
class Rule:
    """One tensor of megatron-core; `{}` in a name is the number of the layer, a second one of the expert."""

    megatron: str
    parts: tuple[str, ...]
    layout: Layout

    @property
    def counts_tokens(self) -> bool:
        """Tell whether there is a row for each token, and others so that ranks have equally many."""
        return self.megatron in (EMBEDDING.megatron, OUTPUT.megatron)


def _merge_qkv(parts: Sequence[Tensor], shape: Shape) -> Tensor:
    """Interleave by key-value group: its queries, its key, its value."""
    grouped = [part.reshape(shape.groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _split_qkv(whole: Tensor, shape: Shape) -> Sequence[Tensor]:
    grouped = whole.reshape(shape.groups, -1, *whole.shape[1:])
    queries = grouped.shape[1] - 2 * shape.head_dim  # and what lies before the keys, as gates do
    return torch.split(grouped, [queries, shape.head_dim, shape.head_dim], dim=1)


def _qkv_shapes(whole: tuple[int, ...], shape: Shape) -> Sequence[tuple[int, ...]]:
    keys = shape.groups * shape.head_dim
    return [(rows, *whole[1:]) for rows in (whole[0] - 2 * keys, keys, keys)]


SAME = Layout(
    merge=lambda parts, _: parts[0], split=lambda whole, _: [whole], part_shapes=lambda whole, _: [whole]
)
GATE_UP = Layout(
    merge=lambda parts, _: torch.cat(list(parts)),
    split=lambda whole, _: whole.chunk(2),
    part_shapes=lambda whole, _: [(whole[0] // 2, *whole[1:])] * 2,
)
QKV = Layout(merge=_merge_qkv, split=_split_qkv, part_shapes=_qkv_shapes, by_group=True)
ADAPTER = "_adapter"
"""Ends the name of the module with a layer's adapter, which lies beside the layer."""
ROUTER = "mlp.router.weight"
"""Name in a layer of the weight that scores its experts."""
CHOICE_BIAS = "mlp.router.expert_bias"
"""Name in a layer of the bias by which experts are chosen. It is float32 whatever the model is: rounded, it
would choose others."""
EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), SAME)
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), SAME)
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), SAME)
SCORE = Rule(SCORE_HEAD, (SCORE_HEAD,), SAME)
HEAD = "mtp.layers.0."
"""Begins the names of a head for the token after the next, as megatron-core has them."""
HEAD_LAYER = f"{HEAD}transformer_layer."
"""Begins the names of its layer."""


def as_it_came(name: str) -> Rule:
    """Make the rule of a tensor that is no part of the model, and is kept under its Hugging Face name."""
    return Rule(name, (name,), SAME)


def is_adapter(name: str) -> bool:
    return f"{ADAPTER}." in name


def is_trained_with_adapters(name: str) -> bool:
    """Tell whether a parameter is trained where weights are frozen under adapters."""
    return is_adapter(name) or name == SCORE_HEAD


def layer_rule(megatron: str, parts: Sequence[str], layout: Layout = SAME) -> Rule:
    """Make a rule for one tensor of every layer."""
    return Rule(
        f"decoder.layers.{{}}.{megatron}", tuple(f"model.layers.{{}}.{part}" for part in parts), layout
    )


QKV_WEIGHT = layer_rule(
    "self_attention.linear_qkv.weight", [f"self_attn.{x}_proj.weight" for x in ("q", "k", "v")], QKV
)
INPUT_NORM = layer_rule("input_layernorm.weight", ["input_layernorm.weight"])
MLP_NORM = layer_rule("pre_mlp_layernorm.weight", ["post_attention_layernorm.weight"])
SHARED_LAYER = (
    INPUT_NORM,
    QKV_WEIGHT,
    layer_rule("self_attention.linear_proj.weight", ["self_attn.o_proj.weight"]),
    MLP_NORM,
)
"""Rules of a layer that families share whose queries, keys and values are made of hidden states."""


def replaced(rules: Sequence[Rule], others: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules with others in the place of those of the same tensors, and the rest of them behind."""
    by_name = {rule.megatron: rule for rule in (*rules, *others)}
    return tuple(by_name.values())


QKV_BIAS = layer_rule(
    "self_attention.linear_qkv.bias", [f"self_attn.{x}_proj.bias" for x in ("q", "k", "v")], QKV
)
QK_NORM = (
    layer_rule("self_attention.q_layernorm.weight", ["self_attn.q_norm.weight"]),
    layer_rule("self_attention.k_layernorm.weight", ["self_attn.k_norm.weight"]),
)
DENSE_MLP = (
    layer_rule("mlp.linear_fc1.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], GATE_UP),
    layer_rule("mlp.linear_fc2.weight", ["mlp.down_proj.weight"]),
)


def expert_rules(gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Make the rules of one expert from the names of its three projections in a layer."""
    experts = "mlp.experts.local_experts.{}"
    return (
        layer_rule(f"{experts}.linear_fc1.weight", [gate, up], GATE_UP),
        layer_rule(f"{experts}.linear_fc2.weight", [down]),
    )


def shared_expert_rules(name: str) -> tuple[Rule, ...]:
    """Make the rules of the expert that every token passes through, from its Hugging Face name in a layer."""
    parts = [f"{name}.{part}_proj.weight" for part in ("gate", "up")]
    return (
        layer_rule("mlp.shared_experts.linear_fc1.weight", parts, GATE_UP),
        layer_rule("mlp.shared_experts.linear_fc2.weight", [f"{name}.down_proj.weight"]),
    )


Requirement = tuple[str, Callable[[Any, PretrainedConfig], bool], str]
"""Name in the configuration, a function whether its value is supported, and the reason if it is not."""


def nothing(name: str) -> bool:
    """Tell no name from others."""
    return False


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describes a model family."""

    layer_rules: tuple[Rule, ...]
    """Rules of every layer with attention, without its MLP."""
    delta_rules: tuple[Rule, ...] = ()
    """The same of layers that are delta nets."""
    dense_rules: tuple[Rule, ...] = DENSE_MLP
    """Rules of the MLP in layers without experts."""
    router_rules: tuple[Rule, ...] = ()
    """Rules of sparse layers, once per layer, a shared expert's among them."""
    expert_rules: tuple[Rule, ...] = ()
    """Rules of sparse layers, once per expert."""
    experts: Callable[[PretrainedConfig], Experts] | None = None
    """Reads the experts from a configuration; `None` for families without."""
    latent: LatentSizes | None = None
    """Sizes of latent attention; `None` for families without."""
    delta: DeltaSizes | None = None
    """Sizes of delta nets; `None` for families without."""
    output_gate: bool = False
    """Says that sigmoids weigh what attention makes of values; in files they are rows of queries' layer."""
    rotation: int = 1
    """Number of equal pieces of a head of which the rotary embedding turns the first one
    (learner/backends/megatron/conversion/partial_rotation.py)."""
    attention_scale: float | None = None
    """Factor of the scores of attention; `None` is one over the root of the width of a head."""
    embedding_scale: float | None = None
    """Factor of the embedded tokens; `None` is 1."""
    gate: Gate = SILU
    """What MLPs make of their gate."""
    centred_norms: bool = False
    """Says that norms multiply by 1 plus their weights."""
    biases: bool = False
    """Says that all linear layers but the output layer have a bias, experts and routers included."""
    sinks: bool = False
    """Says that each head of attention has a sink."""
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names in a sparse layer of tensors of files with some of all experts, with the names that its parts
    have in `expert_rules` (learner/backends/megatron/weights/stacks.py)."""
    joined_rows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names in a layer of tensors of files that have the rows of several, with the names that these have in
    `dense_rules` (learner/backends/megatron/weights/stacks.py)."""
    output_norms: bool = False
    """Says that what attention and MLP return is normed before it is added."""
    requirements: tuple[Requirement, ...] = ()
    """Requirements in addition to those of every family."""
    qkv_bias: bool = False
    qk_norm: bool = False
    joint_norms: bool = False
    """Says that these norms are of all queries, and of all keys, of a token together."""
    rotated_parts: tuple[float, ...] = (1.0,)
    """Shares of a head, from its beginning, that the rotary embedding may rotate."""
    head_names: HeadNames | None = None
    """Names that a head for the token after the next has in files; `None` for families without."""
    beside: Callable[[str], bool] = nothing
    """Tells names of files that are no part of what is trained, and are exported as they came."""

    def shape(self, hf_config: PretrainedConfig) -> Shape:
        experts = self.experts(hf_config) if self.experts is not None else None
        return replace(
            Shape.of(hf_config),
            experts=experts,
            latent=self.latent,
            delta=self.delta,
            joint_norms=self.joint_norms,
        )

    def rules(self, shape: Shape) -> Iterator[Rule]:
        """Yield the rules of a whole model, layers and experts written out."""
        yield EMBEDDING
        for layer in range(shape.layers):
            yield from self._layer(layer, shape)
        yield FINAL_NORM
        if shape.scores:
            yield SCORE
        elif not shape.tied:
            yield OUTPUT

    def head(self, shape: Shape) -> Iterator[Rule]:
        """Yield the rules of the head for the token after the next, whose layer has experts where some of the
        model's have; none in families without heads."""
        names, number = self.head_names, shape.layers
        if names is None:
            return
        for megatron, part in names.parts.items():
            yield Rule(f"{HEAD}{megatron}", (part.format(number),), SAME)
        ours, behind = f"decoder.layers.{number}.", f"model.layers.{number}."
        theirs = names.layer.format(number)
        attention = (_written_out(rule, number) for rule in self.layer_rules)
        for rule in (*attention, *self._mlp(number, shape.experts)):
            parts = tuple(theirs + part.removeprefix(behind) for part in rule.parts)
            yield replace(rule, megatron=HEAD_LAYER + rule.megatron.removeprefix(ours), parts=parts)

    def head_copies(self, shape: Shape) -> list[Rule]:
        """Return rules of the copies that files may have of what the head shares with the model: the
        embedding, and the output layer."""
        if self.head_names is None:
            return []
        shared = (
            (self.head_names.embedding, EMBEDDING),
            (self.head_names.output, EMBEDDING if shape.tied else OUTPUT),
        )
        return [
            replace(rule, parts=(name.format(shape.layers),)) for name, rule in shared if name is not None
        ]

    def _layer(self, layer: int, shape: Shape) -> Iterator[Rule]:
        mixing = self.delta_rules if shape.delta_layers[layer] else self.layer_rules
        yield from (_written_out(rule, layer) for rule in mixing)
        experts = shape.experts
        yield from self._mlp(layer, experts if experts is not None and experts.sparse_layers[layer] else None)

    def _mlp(self, layer: int, experts: Experts | None) -> Iterator[Rule]:
        if experts is None:
            yield from (_written_out(rule, layer) for rule in self.dense_rules)
            return
        yield from (_written_out(rule, layer) for rule in self.router_rules)
        for expert in range(experts.count):
            yield from (_written_out(rule, layer, expert) for rule in self.expert_rules)


def _written_out(rule: Rule, *numbers: int) -> Rule:
    parts = tuple(part.format(*numbers) for part in rule.parts)
    return Rule(rule.megatron.format(*numbers), parts, rule.layout)
