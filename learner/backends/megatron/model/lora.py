"""Adapters of a model of megatron-core: where they are, how they leave it, and what weights they make."""

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.contract.backend import NO_TENSORS, Exported, ExportedPiece, TrainedAdapters
from learner.backends.contract.merged_pieces import merged_pieces
from learner.backends.megatron.conversion.base import ADAPTER, SAME, Rule, is_adapter
from learner.backends.megatron.conversion.families import family_of, float32_weights, shape_of
from learner.backends.megatron.model.adapter import (
    COLUMN,
    ROW,
    WHOLE,
    AdaptedLayer,
    Adapter,
    Formula,
    SharedRows,
)
from learner.backends.megatron.model.model import PolicyModel
from learner.backends.megatron.weights.export import exported_pieces
from learner.backends.megatron.weights.rank_weights import (
    EXPERT,
    Holders,
    exported_shapes,
    find_holders,
    global_name,
    stream_hf_weights,
    tensor_group,
    weights_beside,
)
from learner.backends.megatron.weights.stacks import file_name, places_in, stacks_of
from learner.backends.megatron.weights.torch_dist import MegatronWeights
from learner.backends.shared.lora import CHANGE, FrozenBase, PartOfPair, first_a, merged_stream, targeted
from learner.backends.shared.score_head import SCORE_HEAD, is_reward_model
from learner.config.lora import LoraConfig
from learner.model_directories.lazy_weights import LazyWeights, SomeWeights, State
from storage.model_files.adapter_names import PREFIX, WEIGHT, adapter_names, magnitude_name

CUTS = {
    "linear_qkv": COLUMN, "linear_fc1": COLUMN, "linear_proj": ROW, "linear_fc2": ROW,
    "linear_q_proj": COLUMN, "linear_q_down_proj": WHOLE, "linear_q_up_proj": COLUMN,
    "linear_kv_down_proj": WHOLE, "linear_kv_up_proj": COLUMN, "in_proj": COLUMN, "out_proj": ROW,
}  # fmt: skip
LINEAR = re.compile(rf"\.({'|'.join(CUTS)})\.weight$")


def _modules(rule: Rule) -> list[str]:
    return [part.removesuffix(WEIGHT) for part in rule.parts]


def _last(module: str) -> str:
    return module.rsplit(".", 1)[-1]


def _linear_layers(hf_config: PretrainedConfig, config: LoraConfig) -> tuple[list[Rule], dict[str, None]]:
    """Return the rules of all layers that may have an adapter, and in their order the names in files of those
    that have one."""
    places = places_in(stacks_of(hf_config))
    rules = family_of(hf_config).rules(shape_of(hf_config))
    linear = [rule for rule in rules if LINEAR.search(rule.megatron) and rule.parts[0] not in places]
    modules: tuple[list[str], list[str]] = [], []
    for each in linear:
        modules[EXPERT.search(each.megatron) is not None].extend(_modules(each))
    return linear, dict.fromkeys(targeted(config, *modules))


def _adapter_rules(adapted: Iterable[Rule], targets: Container[str], config: LoraConfig) -> Iterator[Rule]:
    for rule in adapted:
        for module in _modules(rule):
            if module not in targets:
                continue
            inside = f"{rule.megatron.removesuffix(WEIGHT)}{ADAPTER}.{_last(module)}"
            for letter, name in zip("AB", adapter_names(module + WEIGHT), strict=True):
                yield Rule(f"{inside}.lora_{letter}", (name,), SAME)
            if config.weight_decomposed:
                yield Rule(f"{inside}.{CHANGE}", (magnitude_name(module + WEIGHT),), SAME)


def adapters_in(directory: Path, hf_config: PretrainedConfig, config: LoraConfig) -> LazyWeights:
    """Return the adapters in a checkpoint by peft's names, with changes of lengths of rows by those of
    lengths, and the head of a reward model. Raises `StorageError` where one lacks."""
    rules = list(_adapter_rules(*_linear_layers(hf_config, config), config))
    if is_reward_model(hf_config):
        rules.append(Rule(SCORE_HEAD, (PREFIX + SCORE_HEAD,), SAME))
    return MegatronWeights(directory, rules, shape_of(hf_config))


class ChunkAdapters:
    """The adapters of this rank's pieces of a model, whose weights are frozen."""

    def __init__(
        self, chunks: Sequence[PolicyModel], hf_config: PretrainedConfig, config: LoraConfig, base: State
    ) -> None:
        """Freeze all weights but the head of a reward model, and add adapters; comes before the data-parallel
        wrapper.

        Raises `ConfigError` for targets that are not there."""
        self.config = config
        self._chunks, self._hf_config = chunks, hf_config
        rules = list(family_of(hf_config).rules(shape_of(hf_config)))
        places = places_in(stacks_of(hf_config))
        names = dict.fromkeys(file_name(part, places) for rule in rules for part in rule.parts)
        self._beside = weights_beside(hf_config, base)
        self._whole = [SCORE_HEAD] if is_reward_model(hf_config) else []
        """Names of weights that are trained whole beside adapters."""
        frozen = [name for name in names if name not in self._whole]
        weights = SomeWeights(base, [*frozen, *self._beside])
        self.base = FrozenBase(config, weights, next(chunks[0].parameters()).dtype)
        linear, self._targets = _linear_layers(hf_config, config)
        self._adapted = {
            rule.megatron: rule for rule in linear if not self._targets.keys().isdisjoint(_modules(rule))
        }
        self._known_holders: Holders | None = None
        self._known_pieces: tuple[list[int], list[ExportedPiece]] | None = None
        """This rank's rows of what is trained, and where the parameters lay then."""
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(name == SCORE_HEAD)
            for name, parameter in list(chunk.named_parameters()):
                if rule := self._adapted.get(global_name(chunk, name)):
                    self._add(chunk, name, parameter, rule)

    def _add(self, chunk: PolicyModel, name: str, weight: Tensor, rule: Rule) -> None:
        path, layer_name = name.removesuffix(WEIGHT).rsplit(".", 1)
        of_expert = EXPERT.search(name) is not None
        parent, group = chunk.get_submodule(path), tensor_group(of_expert)
        cut, ranks = CUTS[layer_name], group.size()
        shape = shape_of(self._hf_config)
        mixed, rows = rule.layout.mixes(shape, ranks), weight.shape[0]
        if mixed:
            rows *= ranks
        elif cut == COLUMN:
            shape = replace(shape, heads=shape.heads // ranks, groups=shape.groups // ranks)
        sizes = [size for size, _ in rule.layout.part_shapes((rows, weight.shape[1]), shape)]
        outputs = dict(zip(map(_last, _modules(rule)), sizes, strict=True))
        shared = None
        if mixed:
            shared = SharedRows.of(rule.layout, shape, outputs, rank=group.rank(), ranks=ranks)
        layer = AdaptedLayer(
            cut=cut, layout=rule.layout, shape=shape, outputs=outputs, shared=shared, of_expert=of_expert
        )
        inputs = weight.shape[1] * (ranks if cut == ROW else 1)
        first = {
            _last(module): first_a(module, self.config.rank, inputs)
            for module in _modules(rule)
            if module in self._targets
        }
        if cut == ROW:
            first = {last: a.chunk(ranks, dim=1)[group.rank()] for last, a in first.items()}
        formula = Formula(scale=self.config.scale, weight_decomposed=self.config.weight_decomposed)
        adapter = Adapter(chunk.config, layer, first, formula, group)
        parent.add_module(f"{layer_name}{ADAPTER}", adapter)

        def add(
            linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
        ) -> tuple[Tensor, Tensor | None]:
            outputs, apart = output
            bias = getattr(linear, "bias", None) if apart is None else None
            return adapter(inputs[0], outputs, linear.weight, bias), apart

        parent.get_submodule(layer_name).register_forward_hook(add)

    # --- out of the model ---

    def _rules(self) -> Iterator[Rule]:
        yield from _adapter_rules(self._adapted.values(), self._targets, self.config)
        yield from (Rule(name, (PREFIX + name,), SAME) for name in self._whole)

    def _holders(self) -> Holders:
        self._known_holders = self._known_holders or find_holders(self._chunks)
        return self._known_holders

    def _streamed(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        found = stream_hf_weights(self._chunks, self._hf_config, self._holders(), rules=self._rules())
        lengths = self._lengths
        for name, tensor in found:
            if name in lengths:
                yield name, self.base.magnitude(lengths[name], tensor)
            else:
                yield name, tensor.to(dtype)

    def exported(self, dtype: torch.dtype) -> Exported:
        """Return the adapters, to publish them alone, as the `dtype` in which they are computed with; the
        lengths of rows are float32."""
        shapes = exported_shapes(self._hf_config, self._holders(), rules=self._rules())
        exact = {name: torch.float32 if name in self._lengths else dtype for name in shapes}
        if dist.get_world_size() > 1:
            return Exported(shapes, {}, NO_TENSORS, exact, pieces=list(self._pieces(dtype)))
        return Exported(shapes, {}, partial(self._streamed, dtype), exact)

    @property
    def _lengths(self) -> dict[str, str]:
        """Return the weights of which lengths of rows are trained, by the names of these."""
        return {magnitude_name(module + WEIGHT): module + WEIGHT for module in self._targets}

    def _pieces(self, dtype: torch.dtype) -> Iterator[ExportedPiece]:
        """Yield this rank's rows of all that is trained, computed with in `dtype`."""
        addresses = [p.data_ptr() for chunk in self._chunks for p in chunk.parameters() if p.requires_grad]
        if self._known_pieces is None or self._known_pieces[0] != addresses:
            found = exported_pieces(self._chunks, shape_of(self._hf_config), self._rules(), {})
            self._known_pieces = addresses, list(found)
        lengths = self._lengths
        for piece in self._known_pieces[1]:
            weight = lengths.get(piece.names[0])
            if weight is None:
                yield replace(piece, dtype=dtype)
            else:
                rows = self.base.magnitude(weight, piece.rows[:, 0], piece.starts)
                yield replace(piece, rows=rows[:, None], dtype=torch.float32)

    def merged_pieces(self, pieces: Sequence[ExportedPiece]) -> list[ExportedPiece]:
        """Return this rank's rows of the weights, of which what they and adapters make together is published.
        Every rank calls this."""
        return merged_pieces(pieces, dict(self._parts()), self.config.scale)

    def _parts(self) -> Iterator[tuple[str, PartOfPair]]:
        """Yield what this rank needs for its part of each adapted weight, by the names of files."""
        for chunk in self._chunks:
            for name, weight in chunk.named_parameters():
                rule = self._adapted.get(global_name(chunk, name))
                for module in _modules(rule) if rule else ():
                    if module in self._targets:
                        adapter = chunk.get_submodule(name.removesuffix(WEIGHT) + ADAPTER)
                        assert isinstance(adapter, Adapter)
                        lengths = partial(self.base.magnitude, module + WEIGHT)
                        yield module + WEIGHT, adapter.part(_last(module), weight, lengths)

    def merged(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield on rank 0 what weights and their adapters make together. Every rank exhausts this."""
        return merged_stream(weights, self._streamed(torch.float32), self._targets, self.config.scale)

    @torch.no_grad()
    def switch_off(self) -> None:
        for chunk in self._chunks:
            for name, parameter in chunk.named_parameters():
                if is_adapter(name) and name.endswith(("lora_B", CHANGE)):
                    parameter.zero_()

    def described(self) -> TrainedAdapters:
        streamed = partial(self._streamed, torch.float32)
        exact = (
            float32_weights(family_of(self._hf_config).rules(shape_of(self._hf_config)))
            | self._beside.dtypes()
        )
        return TrainedAdapters(self.config, self.base.weights, exact, [*self._targets], streamed, self._whole)
