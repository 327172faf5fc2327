"""Files in which one tensor holds what has several names in a family's rules.

GLM-4 has the rows of an MLP's gate and of up in one `gate_up_proj`. gpt-oss has `experts.gate_up_proj`,
[experts, inputs, outputs], whose even columns are the gate's and whose odd ones are up's. In rules the gate
of expert 3 is `experts.3.gate_proj.weight`, [outputs, inputs], as other families have it in files. Here the
one becomes the other, both for what is read and for what is exported."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import Family, Shape
from learner.backends.megatron.conversion.families import family_of, shape_of
from learner.model_directories.lazy_weights import ChangedWeights, LazyWeights, Spec, State, part_of, spec_of


@dataclass(frozen=True)
class Stack:
    """A tensor of files with some of every expert of a layer."""

    name: str
    members: tuple[tuple[str, ...], ...]
    """Names in rules by expert; one expert's have columns in turn."""

    def shape(self, member: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the stack from that of a member."""
        outputs, *inputs = member
        return (len(self.members), *inputs, outputs * len(self.members[0]))

    def member_shape(self, stack: Sequence[int]) -> tuple[int, ...]:
        _, *inputs, outputs = stack
        return (outputs // len(self.members[0]), *inputs)

    def view(self, whole: Tensor, expert: int, column: int) -> Tensor:
        """View a member in the stack; `column` is its number among those of its expert."""
        columns = whole[expert][..., column :: len(self.members[0])]
        return columns.t()  # a bias stays as it is

    def read(self, state: State, expert: int, column: int) -> Tensor:
        """Read the part of the stack that has a member, and return the member."""
        return self.view(part_of(state, self.name, 0, expert, expert + 1), 0, column)


@dataclass(frozen=True)
class JoinedRows(Stack):
    """A tensor of files with the rows of several tensors, one after another; they have no experts."""

    def shape(self, member: Sequence[int]) -> tuple[int, ...]:
        rows, *inputs = member
        return (rows * len(self.members[0]), *inputs)

    def member_shape(self, stack: Sequence[int]) -> tuple[int, ...]:
        rows, *inputs = stack
        return (rows // len(self.members[0]), *inputs)

    def view(self, whole: Tensor, expert: int, column: int) -> Tensor:
        return whole.chunk(len(self.members[0]))[column]

    def read(self, state: State, expert: int, column: int) -> Tensor:
        rows = self.member_shape(spec_of(state, self.name).shape)[0]
        return part_of(state, self.name, 0, column * rows, (column + 1) * rows)


@dataclass(frozen=True)
class StackPlace:
    """Where a member lies in its stack."""

    stack: Stack
    expert: int
    column: int
    """Number among the members of its expert."""

    def of(self, whole: Tensor) -> Tensor:
        """View the member in the stack."""
        return self.stack.view(whole, self.expert, self.column)

    def read(self, state: State) -> Tensor:
        return self.stack.read(state, self.expert, self.column)


Places = Mapping[str, StackPlace]


def stacks_of(hf_config: PretrainedConfig) -> tuple[Stack, ...]:
    """Return the stacks of a model; none in most families."""
    family, shape = family_of(hf_config), shape_of(hf_config)
    joined = (
        JoinedRows(
            f"model.layers.{layer}.{name}", (tuple(f"model.layers.{layer}.{each}" for each in members),)
        )
        for layer in range(shape.layers)
        for name, members in family.joined_rows.items()
    )
    return (*joined, *_stacks_of_experts(family, shape))


def _stacks_of_experts(family: Family, shape: Shape) -> Iterator[Stack]:
    if shape.experts is None or not family.stacked:
        return
    sparse = [layer for layer, has in enumerate(shape.experts.sparse_layers) if has]
    yield from (
        Stack(
            f"model.layers.{layer}.{name}",
            tuple(
                tuple(f"model.layers.{layer}.{member.format(expert)}" for member in members)
                for expert in range(shape.experts.count)
            ),
        )
        for layer in sparse
        for name, members in family.stacked.items()
    )


def places_in(stacks: Iterable[Stack]) -> dict[str, StackPlace]:
    """Return where each member lies, by its name in rules."""
    return {
        member: StackPlace(stack, expert, column)
        for stack in stacks
        for expert, of_expert in enumerate(stack.members)
        for column, member in enumerate(of_expert)
    }


def file_name(name: str, places: Places) -> str:
    """Return the name in files of a tensor that rules name."""
    return places[name].stack.name if name in places else name


def in_files(shapes: Mapping[str, tuple[int, ...]], places: Places) -> dict[str, tuple[int, ...]]:
    """Return shapes by the names of files; a stack is there if any of its members is."""
    return {
        file_name(name, places): places[name].stack.shape(shape) if name in places else shape
        for name, shape in shapes.items()
    }


def unstacked(state: State, stacks: Sequence[Stack]) -> State:
    """Return a state by the names of rules; `state` itself where there are no stacks."""
    if not stacks:
        return state
    return state.members if isinstance(state, StackedWeights) else _Members(state, stacks)


class _Members(ChangedWeights):
    """The weights of a state with the members of stacks in their place."""

    def __init__(self, state: State, stacks: Sequence[Stack]) -> None:
        found = {stack.name: stack for stack in stacks if stack.name in state}
        self._places = places_in(found.values())
        names = (
            (member for of_expert in found[name].members for member in of_expert)
            if name in found
            else (name,)
            for name in state
        )
        specs = {name: spec_of(state, name) for name in found}
        made = {}
        for member, place in self._places.items():
            shape, dtype = specs[place.stack.name]
            made[member] = Spec(place.stack.member_shape(shape), dtype)
        super().__init__(state, dict.fromkeys(name for several in names for name in several), made)

    def make(self, name: str) -> Tensor:
        return self._places[name].read(self._weights)


class StackedWeights(ChangedWeights):
    """Weights by the names of files, made of some by the names of rules."""

    def __init__(self, members: LazyWeights, stacks: Sequence[Stack]) -> None:
        self.members = members
        self._stacks = {stack.name: stack for stack in stacks}
        places = places_in(stacks)
        firsts = {
            n: members.spec(stack.members[0][0])
            for n, stack in self._stacks.items()
            if stack.members[0][0] in members
        }
        made = {name: Spec(self._stacks[name].shape(shape), dtype) for name, (shape, dtype) in firsts.items()}
        super().__init__(members, dict.fromkeys(file_name(name, places) for name in members), made)

    def make(self, name: str) -> Tensor:
        whole = torch.empty(*self.spec(name)[:1], dtype=self.spec(name).dtype)
        for member, place in places_in([self._stacks[name]]).items():
            place.of(whole).copy_(self.members[member])
        return whole


def stacked(weights: Iterable[tuple[str, Tensor]], stacks: Sequence[Stack]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights by the names of files, each stack when its last member has come."""
    places, left = places_in(stacks), {stack.name: _count(stack) for stack in stacks}
    filling: dict[str, Tensor] = {}
    for name, tensor in weights:
        place = places.get(name)
        if place is None:
            yield name, tensor
            continue
        stack = place.stack
        if stack.name not in filling:
            filling[stack.name] = tensor.new_empty(stack.shape(tensor.shape))
        place.of(filling[stack.name]).copy_(tensor)
        left[stack.name] -= 1
        if not left[stack.name]:
            yield stack.name, filling.pop(stack.name)


def stacked_shapes(
    shapes: Mapping[str, tuple[int, ...]], stacks: Sequence[Stack]
) -> dict[str, tuple[int, ...]]:
    """Return shapes by the names of files, in the order of `stacked`."""
    places, left = places_in(stacks), {stack.name: _count(stack) for stack in stacks}
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        place = places.get(name)
        if place is None:
            found[name] = shape
            continue
        left[place.stack.name] -= 1
        if not left[place.stack.name]:
            found[place.stack.name] = place.stack.shape(shape)
    return found


def _count(stack: Stack) -> int:
    return len(stack.members) * len(stack.members[0])
