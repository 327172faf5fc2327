"""Frozen policies, whose weights take the model's place for a pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from learner.host_memory.copies import host_memory
from learner.model_directories.lazy_weights import State

Weights = list[dict[str, Tensor]]
"""Weights of each piece of the model on this rank, by the names of its parameters."""


class FrozenPolicies:
    """Weights by tag, such as "reference": this rank's part of each in host memory, laid out like the model.

    A switch copies bit for bit, so it works in any layout of ranks. The copy needs no other rank. To find the
    current parameters may be a collective: every rank calls `hold`, `load`, `in_place`, and `weights` of a
    tag that is not held, in the same order. Each tag takes as
    much host memory on a rank as the rank's parameters, and the current policy as much again from the first
    switch on. With CUDA all of it is page-locked, in whole pages."""

    def __init__(
        self, live: Callable[[], Weights], *, load: Callable[[PretrainedConfig, State], None]
    ) -> None:
        """Lend weights to a model.

        `live` returns this rank's part of its parameters, once nothing writes them any more; `load` gives
        them weights by Hugging Face name, and raises `ConfigError` where they do not fit."""
        self.sources: dict[str, Path] = {}
        """Directories that tags were read from."""
        self._live = live
        self._load = load
        self._held: dict[str, Weights] = {}
        self._current: Weights | None = None
        self._lent: str | None = None
        """Tag of the policy whose weights the model has now."""
        self._foreign: set[str] = set()
        """Tags of policies that the run neither began with nor trained."""

    def __contains__(self, tag: str) -> bool:
        return tag in self._held

    @property
    def own(self) -> set[str]:
        """Tags of policies that this run trained itself: only its checkpoints hold them."""
        return self._held.keys() - self.sources.keys()

    @property
    def lends_foreign(self) -> bool:
        """Tell whether the model has weights now that the run neither began with nor trained."""
        return self._lent in self._foreign

    def hold(self, tag: str) -> None:
        """Hold the current policy under `tag`, instead of the one held there."""
        self._put(tag, self._live(), None)

    def load(
        self, tag: str, hf_config: PretrainedConfig, state: State, source: Path, *, is_initial: bool = False
    ) -> None:
        """Read the policy of `tag` from weights by their Hugging Face names. Every rank calls this.

        `source` is where to find them again; `is_initial` says that the run began with them. Raises
        `ConfigError` where they do not fit the model."""
        with self._current_kept() as live:
            self._load(hf_config, state)
            self._put(tag, live, source)
        if not is_initial:
            self._foreign.add(tag)

    def restore(self, tag: str, weights: Weights) -> None:
        """Hold `weights` from a checkpoint under `tag`."""
        self._put(tag, weights, None)

    def weights(self, tag: str) -> Weights:
        """Return what is held of `tag`; or buffers for it, whose contents mean nothing yet."""
        return self._held.get(tag) or _buffers_like(self._live())

    def keep_only(self, tags: set[str]) -> None:
        """Drop all other policies."""
        self._held = {tag: weights for tag, weights in self._held.items() if tag in tags}
        self.sources = {tag: source for tag, source in self.sources.items() if tag in tags}

    @contextmanager
    def in_place(self, tag: str) -> Iterator[None]:
        """Give the model the weights of `tag` while inside, where no gradient or update may be made. Raises
        `ValueError` when nothing is held under that name."""
        if tag not in self._held:
            raise ValueError(f"no policy is held as {tag!r}, only {sorted(self._held)}")
        with self._current_kept() as live:
            _copy(self._held[tag], live)
            self._lent = tag
            try:
                yield
            finally:
                self._lent = None

    @contextmanager
    def _current_kept(self) -> Iterator[Weights]:
        live = self._live()
        self._current = self._current or _buffers_like(live)
        _copy(live, self._current)
        try:
            yield live
        finally:
            _copy(self._current, live)

    def _put(self, tag: str, weights: Weights, source: Path | None) -> None:
        if tag not in self._held:
            self._held[tag] = _buffers_like(weights)
        _copy(weights, self._held[tag])
        self.sources.pop(tag, None)
        self._foreign.discard(tag)
        if source is not None:
            self.sources[tag] = source
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # on the host: a checkpoint reads it from there


def _buffers_like(weights: Sequence[Mapping[str, Tensor]]) -> Weights:
    return [dict(zip(chunk, _like(list(chunk.values())), strict=True)) for chunk in weights]


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    wanted = [(tensor.shape, tensor.dtype) for tensor in tensors]
    return host_memory(wanted, page_locked=torch.cuda.is_available())


@torch.no_grad()
def _copy(source: Weights, target: Weights) -> None:
    for ours, theirs in zip(source, target, strict=True):
        for name, tensor in ours.items():
            theirs[name].copy_(tensor, non_blocking=True)
