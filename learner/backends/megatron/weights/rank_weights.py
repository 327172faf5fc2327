"""Loads weights into a model and exports them, by their Hugging Face names, in any layout of ranks.

Each rank reads its slice of each tensor, and of safetensors files nothing else. On export, rank 0 receives
the slices of one tensor at a time from the first ranks that hold them, so that it never has more of the model
than the caller keeps."""

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from bus.errors import ConfigError, listed
from bus.process.work_progress import tracked
from learner.backends.megatron.conversion.base import (
    CHOICE_BIAS,
    EMBEDDING,
    OUTPUT,
    ROUTER,
    SAME,
    Rule,
    Shape,
)
from learner.backends.megatron.conversion.families import family_of, shape_of
from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.weights.stacks import (
    file_name,
    in_files,
    places_in,
    stacked,
    stacked_shapes,
    stacks_of,
    unstacked,
)
from learner.backends.shared.score_head import is_reward_model
from learner.distributed.process_group import device, gathered
from learner.model_directories.lazy_weights import LazyWeights, SomeWeights, State, misfits, part_of, spec_of
from learner.model_directories.text_model import saved_shapes
from storage.model_files.finite_weights import refuse_not_finite

log = structlog.get_logger()
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def load_hf_weights(
    chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig, state: State, *,
    head: Sequence[Rule] | None = None,
) -> None:  # fmt: skip
    """Copy this rank's part of `state` into its `chunks`, converting to their dtype and device.

    With the rules of a `head`, `chunks` and `state` are of that alone. Raises `ConfigError` with all names
    that are missing, unexpected or of another shape, on every rank alike; the model is then unchanged. Every
    rank calls this."""
    shape, family = shape_of(hf_config), family_of(hf_config)
    rules = list(family.rules(shape) if head is None else head)
    slices = slices_of(chunks)
    stacks = stacks_of(hf_config)
    wanted = {name for name in state if head is not None or not family.beside(name)}
    if len(wanted) < len(state) and dist.get_rank() == 0:
        why = "heads for several next tokens stay as they came"
        log.info("weights_not_trained", tensors=len(state) - len(wanted), why=why)
    here = list(_problems(slices, rules, hf_config, state, wanted))
    problems = list(dict.fromkeys(problem for of_rank in gathered(here) for problem in of_rank))
    if problems:
        raise ConfigError(f"these weights do not fit the model:\n{listed(problems)}")
    state = unstacked(state, stacks)
    if dist.get_rank() == 0:
        _tell_rounded_routers(rules, state, next(chunks[0].parameters()).dtype)
    if shape.tied and OUTPUT.megatron in slices:  # the last stage of a pipeline has its own copy
        rules.append(Rule(OUTPUT.megatron, EMBEDDING.parts, SAME))
    with torch.no_grad():
        for rule in tracked(rules, "loading the weights"):
            if mine := slices.get(rule.megatron):
                mine.parameter.copy_(slice_of(rule, mine, state, shape))
    mine_by_file = ((rule.parts[0], slices.get(rule.megatron)) for rule in rules)
    refuse_not_finite(((name, mine.parameter) for name, mine in mine_by_file if mine), "the model")


def _tell_rounded_routers(rules: Sequence[Rule], state: State, dtype: torch.dtype) -> None:
    """Warn where routers lose digits that transformers would keep: it has them in float32 in the families
    whose experts are chosen with a bias."""
    if dtype == torch.float32 or not any(rule.megatron.endswith(CHOICE_BIAS) for rule in rules):
        return
    routers = [name for rule in rules if rule.megatron.endswith(ROUTER) for name in rule.parts]
    rounded = [name for name in routers if spec_of(state, name).dtype == torch.float32]
    if rounded:
        why = "transformers keeps them in float32: some tokens will go to other experts than there"
        log.warning("router_weights_rounded", tensors=len(rounded), dtype=str(dtype), why=why)


@torch.no_grad()
def stream_hf_weights(
    chunks: Sequence[torch.nn.Module],
    hf_config: PretrainedConfig,
    holders: "Holders | None" = None,
    *,
    without: Container[str] = (),
    rules: Iterable[Rule] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights one after another on rank 0; what is yielded is good until the next.

    Every rank must exhaust this iterator; it yields nothing on the others. `holders` as `find_holders` gave
    them spare all ranks that they tell each other what they have. `without`, on rank 0, names weights that
    `whole_on_rank_0` has. `rules` are for other tensors of the model than its weights."""
    found = _streamed(chunks, hf_config, holders, without, rules)
    yield from found if rules is not None else stacked(found, stacks_of(hf_config))


def _streamed(
    chunks: Sequence[torch.nn.Module],
    hf_config: PretrainedConfig,
    holders: "Holders | None",
    without: Container[str],
    rules: Iterable[Rule] | None,
) -> Iterator[tuple[str, Tensor]]:
    shape = shape_of(hf_config)
    slices = slices_of(chunks)
    holders = _holders(slices) if holders is None else holders
    for rule in family_of(hf_config).rules(shape) if rules is None else rules:
        whole = _gather(slices.get(rule.megatron), holders[rule.megatron])
        if whole is None or rule.parts[0] in without:
            continue
        yield from parts_of(rule, whole, shape)


def exported_shapes(
    hf_config: PretrainedConfig, holders: "Holders", *, rules: Iterable[Rule] | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights that are exported, in the order of `stream_hf_weights`."""
    shape = shape_of(hf_config)
    shapes = {
        name: sizes
        for rule in (family_of(hf_config).rules(shape) if rules is None else rules)
        for name, sizes in zip(
            rule.parts, part_shapes_of(rule, holders[rule.megatron][0], shape), strict=True
        )
    }
    return shapes if rules is not None else stacked_shapes(shapes, stacks_of(hf_config))


def whole_on_rank_0(
    chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig, *, rules: Iterable[Rule] | None = None
) -> dict[str, Tensor]:
    """Return views of the weights in a world of one, but not of several experts together or of what is
    scattered.

    Their elements are in the order of the Hugging Face tensor, whose shape they need not have. They are good
    as long as the parameters stay where they lie."""
    shape = shape_of(hf_config)
    slices = slices_of(chunks)
    views: dict[str, Tensor] = {}
    in_stacks = places_in(stacks_of(hf_config))
    for rule in family_of(hf_config).rules(shape) if rules is None else rules:
        if rule.parts[0] in in_stacks or rule.layout.scattered:
            continue
        parts = rule.layout.split(slices[rule.megatron].parameter, shape)
        rows = shape.vocab if rule.counts_tokens else None
        views |= {name: part[:rows] for name, part in zip(rule.parts, parts, strict=True)}
    return views


@dataclass(frozen=True)
class Cut:
    """Says which part of a tensor a rank holds."""

    dimension: int | None
    """Dimension along which the ranks share the tensor; `None` if each holds all of it."""
    ranks: int
    rank: int
    sizes: tuple[int, ...]
    """Sizes of the slice."""

    def whole_sizes(self) -> tuple[int, ...]:
        """Return the sizes of the tensor that was cut."""
        return tuple(n * self.ranks if i == self.dimension else n for i, n in enumerate(self.sizes))

    def shape(self, shape: Shape) -> Shape:
        """Return the model's shape as far as a slice of attention is concerned."""
        if self.dimension is None:
            return shape
        return replace(shape, heads=shape.heads // self.ranks, groups=shape.groups // self.ranks)

    def read(self, state: State, name: str) -> Tensor:
        """Return this rank's slice of a Hugging Face tensor; what it lacks to divide evenly is zero."""
        if self.dimension is None or self.ranks == 1:
            return state[name]
        whole = spec_of(state, name).shape[self.dimension]
        size = -(-whole // self.ranks)
        start, stop = (min(i * size, whole) for i in (self.rank, self.rank + 1))
        piece = part_of(state, name, self.dimension, start, stop)
        lacking = size - (stop - start)
        if lacking:
            shape = [lacking if i == self.dimension else n for i, n in enumerate(piece.shape)]
            piece = torch.cat((piece, piece.new_zeros(shape)), self.dimension)
        return piece

    def join(self, pieces: Sequence[Tensor], sizes: tuple[int, ...]) -> Tensor:
        """Undo `read`: the tensor of these sizes, without what was added so that it divides evenly."""
        whole = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), self.dimension or 0)
        return whole[: sizes[0]] if whole.dim() == len(sizes) else whole.reshape(sizes)


def slice_of(rule: Rule, cut: Cut, state: State, shape: Shape) -> Tensor:
    """Return a slice of a rule's tensor, made of the Hugging Face tensors in `state`."""
    if rule.layout.mixes(shape, cut.ranks):
        whole = rule.layout.merge([state[name] for name in rule.parts], shape)
        return whole.chunk(cut.ranks)[cut.rank]
    return rule.layout.merge([cut.read(state, name) for name in rule.parts], cut.shape(shape))


def parts_of(rule: Rule, slices: Sequence[tuple[Tensor, Cut]], shape: Shape) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors that a rule's tensor is made of, from all its slices in their order."""
    cut = slices[0][1]
    if rule.layout.mixes(shape, cut.ranks):
        slices = [(torch.cat([piece for piece, _ in slices]), Cut(None, 1, 0, cut.whole_sizes()))]
        cut = slices[0][1]
    parts_of_slices = [rule.layout.split(piece, each.shape(shape)) for piece, each in slices]
    sizes = part_shapes_of(rule, cut, shape)
    for name, size, *pieces in zip(rule.parts, sizes, *parts_of_slices, strict=True):
        yield name, cut.join(pieces, size)


@dataclass(frozen=True)
class Slice(Cut):
    """A rank's part of a tensor."""

    parameter: Tensor


@dataclass(frozen=True)
class Holder(Cut):
    """Rank that has a slice that rank 0 needs."""

    global_rank: int
    dtype: torch.dtype


def slices_of(chunks: Sequence[torch.nn.Module]) -> dict[str, Slice]:
    """Return all parameters of this rank by their names in the whole model."""
    slices = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            expert = EXPERT.search(name) is not None
            divided = getattr(parameter, "tensor_model_parallel", False)
            dimension = parameter.partition_dim if divided else -1  # type: ignore[attr-defined]  # megatron-core's
            cut = dimension >= 0
            group = tensor_group(expert)
            slices[global_name(chunk, name)] = Slice(
                dimension if cut else None,
                group.size() if cut else 1,
                group.rank() if cut else 0,
                tuple(parameter.shape),
                parameter.detach(),
            )
    return slices


def global_name(chunk: Any, name: str) -> str:
    """Count layers and experts over all ranks instead of over this one."""

    def layer(match: re.Match[str]) -> str:
        return f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}."

    def expert(match: re.Match[str]) -> str:
        here = chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * here
        return f".local_experts.{first + int(match[1])}."

    return str(chunk.weight_prefix) + EXPERT.sub(expert, LAYER.sub(layer, name))


def tensor_group(expert: bool) -> dist.ProcessGroup:
    """Return the ranks that share each tensor, of an expert or of the rest."""
    if expert:
        return parallel_state.get_expert_tensor_parallel_group()  # type: ignore[no-any-return]
    return parallel_state.get_tensor_model_parallel_group()  # type: ignore[no-any-return]


Holders = dict[str, list[Holder]]


def find_holders(chunks: Sequence[torch.nn.Module]) -> Holders:
    """Find the ranks that have the slices rank 0 needs, for this layout of ranks. Every rank calls this."""
    return _holders(slices_of(chunks))


def _holders(slices: Mapping[str, Slice]) -> Holders:
    """Return for every tensor the first ranks that together hold all of it, in the order of slices."""
    mine = {
        name: Holder(s.dimension, s.ranks, s.rank, s.sizes, dist.get_rank(), s.parameter.dtype)
        for name, s in slices.items()
        if data_parallel_rank(name) == 0
    }
    found: dict[str, dict[int, Holder]] = {}
    for of_rank in gathered(mine):
        for name, holder in of_rank.items():
            found.setdefault(name, {}).setdefault(holder.rank, holder)
    return {name: [by_slice[i] for i in sorted(by_slice)] for name, by_slice in found.items()}


def data_parallel_rank(name: str) -> int:
    """Return this rank's number among those that have the same part of a parameter."""
    if EXPERT.search(name):
        return parallel_state.get_expert_data_parallel_rank()  # type: ignore[no-any-return]
    return parallel_state.get_data_parallel_rank(with_context_parallel=True)  # type: ignore[no-any-return]


def _gather(mine: Slice | None, holders: Sequence[Holder]) -> list[tuple[Tensor, Cut]] | None:
    """Bring the slices to rank 0, which returns them; the others return `None`."""
    here = dist.get_rank()
    if here != 0:
        if mine is not None and any(holder.global_rank == here for holder in holders):
            dist.send(mine.parameter.contiguous(), dst=0)
        return None
    return [(_received(mine, holder), holder) for holder in holders]


def _received(mine: Slice | None, holder: Holder) -> Tensor:
    if mine is not None and holder.global_rank == 0:
        return mine.parameter
    received = torch.empty(holder.sizes, dtype=holder.dtype, device=device())
    dist.recv(received, src=holder.global_rank)
    return received


def _problems(
    slices: Mapping[str, Slice], rules: Sequence[Rule], hf_config: PretrainedConfig, state: State,
    wanted: Set[str],
) -> Iterator[str]:  # fmt: skip
    """Say what of the weights that are `wanted` of a state does not fit the slices of this rank."""
    shape, places = shape_of(hf_config), places_in(stacks_of(hf_config))
    expected: dict[str, tuple[int, ...]] = {}
    for rule in rules:
        if rule.megatron in slices:
            sizes = part_shapes_of(rule, slices[rule.megatron], shape)
            expected |= dict(zip(rule.parts, sizes, strict=True))
    known = {file_name(name, places) for rule in rules for name in rule.parts}
    return misfits(
        in_files(expected, places),
        state,
        lambda name: name in known or name not in wanted or says_nothing_new(name, hf_config),
    )


def part_shapes_of(rule: Rule, cut: Cut, shape: Shape) -> Sequence[tuple[int, ...]]:
    """Return the shapes of the Hugging Face tensors that a rule's tensor is made of."""
    whole = cut.whole_sizes()
    if rule.counts_tokens:
        whole = (shape.vocab, *whole[1:])
    return rule.layout.part_shapes(whole, shape)


def weights_beside(hf_config: PretrainedConfig, state: State) -> SomeWeights:
    """Return the weights of `state` that are beside the model."""
    beside = family_of(hf_config).beside
    return SomeWeights(state, [name for name in state if beside(name)])


def without_beside(hf_config: PretrainedConfig, state: State) -> SomeWeights:
    """Return the weights of `state` that are of the model."""
    beside = family_of(hf_config).beside
    return SomeWeights(state, [name for name in state if not beside(name)])


def refuse_misfits(source: Path, hf_config: PretrainedConfig, state: LazyWeights) -> None:
    """Raise `ConfigError` for weights that are not those which transformers would save for this
    configuration."""
    form = AutoModelForSequenceClassification if is_reward_model(hf_config) else AutoModelForCausalLM
    beside = family_of(hf_config).beside
    found = misfits(
        saved_shapes(hf_config, form), state, lambda name: beside(name) or says_nothing_new(name, hf_config)
    )
    if problems := list(found):
        raise ConfigError(f"the weights in {source} do not fit its config.json:\n{listed(problems)}")


def says_nothing_new(name: str, hf_config: PretrainedConfig) -> bool:
    """Tell a tied output layer, and a buffer of old Llama files, from what a model may not have."""
    tied = hf_config.tie_word_embeddings and name in OUTPUT.parts
    return tied or name.endswith("rotary_emb.inv_freq")
