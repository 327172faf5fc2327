"""Weights that are read one at a time, so that a model larger than memory can be converted or loaded."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128

from bus.errors import ConfigError

State = Mapping[str, Tensor]
"""Weights by their Hugging Face name."""


class Spec(NamedTuple):
    """Shape and dtype of a tensor, known before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class LazyWeights(Mapping[str, Tensor]):
    """Weights by Hugging Face name; each look-up reads from disk."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` are those of all weights, in their order; many may be looked up."""
        self._listed = names

    def __contains__(self, name: object) -> bool:
        return name in self._listed  # the look-up that `Mapping` does by default would read

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)

    @abstractmethod
    def spec(self, name: str) -> Spec:
        """Return shape and dtype without reading the tensor."""

    def part(self, name: str, dimension: int, start: int, stop: int) -> Tensor:
        """Return the elements from `start` to `stop` along a dimension; reads no others where it can."""
        return self[name].narrow(dimension, start, stop - start)


class PlacedWeights(LazyWeights):
    """Weights of other states, by names of its own."""

    def __init__(self, places: Mapping[str, tuple[State, str]]) -> None:
        """`places` says which state has each, and its name there."""
        super().__init__(places)
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        state, there = self._places[name]
        return state[there]

    def spec(self, name: str) -> Spec:
        return spec_of(*self._places[name])

    def part(self, name: str, dimension: int, start: int, stop: int) -> Tensor:
        return part_of(*self._places[name], dimension, start, stop)


class SomeWeights(PlacedWeights):
    """Some of the weights of a state; the others are as if they were not there."""

    def __init__(self, state: State, names: Iterable[str]) -> None:
        super().__init__({name: (state, name) for name in names})

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of each, unread where the state can."""
        return {name: self.spec(name).dtype for name in self}


def joined_weights(first: State, second: State) -> LazyWeights:
    """Return the weights of one, and those of another that it lacks."""
    return PlacedWeights({name: (first if name in first else second, name) for name in (*first, *second)})


def renamed_weights(weights: State, names: Mapping[str, str]) -> LazyWeights:
    """Return weights by other names: `names` are those that they have there, by their names here."""
    return PlacedWeights({name: (weights, there) for name, there in names.items()})


class ChangedWeights(LazyWeights):
    """The weights of a state, but for some that are made of what lies there."""

    def __init__(self, weights: State, names: Collection[str], made: Mapping[str, Spec]) -> None:
        """`names` are those of all weights, and `made` the specs of those that `make` makes."""
        super().__init__(names)
        self._weights, self._made = weights, made

    @abstractmethod
    def make(self, name: str) -> Tensor:
        """Return a weight that is made."""

    def __getitem__(self, name: str) -> Tensor:
        return self.make(name) if name in self._made else self._weights[name]

    def spec(self, name: str) -> Spec:
        return self._made[name] if name in self._made else spec_of(self._weights, name)

    def part(self, name: str, dimension: int, start: int, stop: int) -> Tensor:
        if name in self._made:
            return super().part(name, dimension, start, stop)
        return part_of(self._weights, name, dimension, start, stop)


def spec_of(state: State, name: str) -> Spec:
    """Return shape and dtype of one tensor, unread where that is possible."""
    if isinstance(state, LazyWeights):
        return state.spec(name)
    return Spec(tuple(state[name].shape), state[name].dtype)


def main_dtype(specs: Iterable[Spec]) -> torch.dtype:
    """Return the dtype of most bytes; some weights may have another, such as a router in float32."""
    sizes: Counter[torch.dtype] = Counter()
    for spec in specs:
        sizes[spec.dtype] += spec.size_bytes
    return sizes.most_common(1)[0][0]


def part_of(state: State, name: str, dimension: int, start: int, stop: int) -> Tensor:
    """Return the elements from `start` to `stop` along a dimension, the others unread where possible."""
    if isinstance(state, LazyWeights):
        return state.part(name, dimension, start, stop)
    return state[name].narrow(dimension, start, stop - start)


def misfits(
    expected: Mapping[str, tuple[int, ...]], state: State, is_ignored: Callable[[str], bool]
) -> Iterator[str]:
    """Yield, for people, by what a state is not of the expected shapes: what it lacks, what has another one,
    and what nobody expects nor ignores."""
    others: list[ConfigError] = []
    for name, shape in expected.items():
        if name not in state:
            yield f"missing {name} {list(shape)}"
            continue
        try:
            found = spec_of(state, name).shape
        except ConfigError as error:  # of a dtype that weights do not have
            others.append(error)
            continue
        if found != shape:
            yield f"{name} is {list(found)}, not {list(shape)}"
    if others:
        yield f"{len(others)} tensors are of another dtype than weights have: {others[0]}"
    yield from (f"unexpected {name}" for name in state if name not in expected and not is_ignored(name))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the elements in order, as they lie in memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_digest(tensor: Tensor) -> str:
    """Return the xxh3-128 digest of its bytes, in hexadecimal; signs of zeros and NaNs count."""
    return xxh3_128(tensor_bytes(tensor)).hexdigest()
