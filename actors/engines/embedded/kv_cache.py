"""The rows of a running batch: their cache behind transformers' Cache interface, and their tokens. Row i of
the batch is slot i of every array. Rows stay compact: a finished row is overwritten by the last one, so a
decode step reads slots [0, n) as a view. Both stores grow by doubling."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

from actors.engines.base import Generation, GenerationRequest
from actors.engines.embedded.sampling import Controls
from bus.kept_sets import KeptSets
from bus.trajectory import FinishReason
from storage.images.positions import rope_delta

SMALLEST_LENGTH = 32
FULL_ATTENTION = "full_attention"
ROW = np.dtype(
    [
        ("length", np.int64),  # tokens, prompt included
        ("prompt", np.int64),  # tokens of the prompt
        ("limit", np.int64),  # length that ends the row
        ("rope_delta", np.int64),  # position of a token behind the prompt's images, less its number
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int64),
        ("min_p", np.float32),
        ("keep_masks", np.bool_),
        ("stops", np.int64),  # index into the table of stop sets
        ("version", np.int32),  # of the weights that computed its oldest keys and values
    ]
)
STATES = ("conv_states", "recurrent_states")
"""What transformers calls them in its own cache."""


@dataclass(slots=True)
class Cursor:
    """Positions that a decode step writes: one new position in each of n rows."""

    rows: Tensor
    """int64 [n], 0 to n - 1."""
    positions: Tensor
    """int64 [n]"""
    width: int
    """Positions that are read back: 1 + the largest position."""


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """One layer's keys and values, [slots, kv_heads, length, head_dim]; each row has its own position."""

    def __init__(self, max_slots: int, max_length: int) -> None:
        super().__init__()
        self.cursor: Cursor | None = None
        self._largest = max_slots, max_length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take shape, type and device from the first states, [n, kv_heads, _, head_dim]."""
        self.keys = key_states.new_empty(0, key_states.shape[1], 0, key_states.shape[3])
        self.values = value_states.new_empty(0, value_states.shape[1], 0, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write one position per row at the cursor and return everything up to its width."""
        cursor = self.cursor
        assert cursor is not None, "a decode step sets the cursor first"
        self.keys[cursor.rows, :, cursor.positions] = key_states[:, :, 0]
        self.values[cursor.rows, :, cursor.positions] = value_states[:, :, 0]
        n = len(cursor.rows)
        return self.keys[:n, :, : cursor.width], self.values[:n, :, : cursor.width]

    def aim(self, cursor: Cursor) -> None:
        """Set where the next forward writes."""
        self.reserve(len(cursor.rows), cursor.width)
        self.cursor = cursor

    def reserve(self, slots: int, length: int) -> None:
        """Grow to at least these sizes, keeping what is held."""
        have = self.keys.shape[0], self.keys.shape[2]
        if slots <= have[0] and length <= have[1]:
            return
        slots = min(_doubled(have[0], slots, 1), self._largest[0])
        length = min(_doubled(have[1], length, SMALLEST_LENGTH), self._largest[1])
        self.keys = _grown(self.keys, slots, length)
        self.values = _grown(self.values, slots, length)

    def fill(self, first: int, prefilled: CacheLayerMixin, sources: Tensor) -> None:
        """Copy row `sources[i]` of prefilled states to slot `first + i`."""
        keys, values = prefilled.keys, prefilled.values
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        count, length = len(sources), keys.shape[2]
        self.reserve(first + count, length)
        self.keys[first : first + count, :, :length] = keys[sources]
        self.values[first : first + count, :, :length] = values[sources]

    def move(self, targets: Tensor, sources: Tensor, length: int) -> None:
        self.keys[targets, :, :length] = self.keys[sources, :, :length]
        self.values[targets, :, :length] = self.values[sources, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys that `update` is about to return."""
        return (self.cursor.width if self.cursor else 0), 0

    def get_seq_length(self) -> int:
        """Return the number of positions in front of the one being written, in the longest row."""
        return self.cursor.width - 1 if self.cursor else 0

    def get_max_length(self) -> int:
        """Return -1: it grows."""
        return -1

    # The cache of transformers 5.12, which three releases of SGLang pin, asks by this name.
    get_max_cache_shape = get_max_length


class SlotCache(Cache):  # type: ignore[misc]
    """The cache of a running batch, layer by layer."""

    def __init__(self, kinds: Sequence[str], max_slots: int, max_length: int) -> None:
        """`kinds` are the `layer_types` of the model, of which all but full attention keep states."""
        super().__init__(layers=[_layer(kind, max_slots, max_length) for kind in kinds])

    def aim(self, positions: Tensor, width: int) -> None:
        """Set where the next forward writes: position `positions[i]` of row i."""
        cursor = Cursor(torch.arange(len(positions), device=positions.device), positions, width)
        for layer in self.layers:
            layer.aim(cursor)

    def fill(self, first: int, prefilled: DynamicCache, sources: Tensor) -> None:
        """Copy row `sources[i]` of a prefilled cache to slot `first + i`."""
        for layer, source in zip(self.layers, prefilled.layers, strict=True):
            layer.fill(first, source, sources)

    def move(self, targets: np.ndarray, sources: np.ndarray, length: int) -> None:
        for layer in self.layers:
            layer.move(torch.from_numpy(targets), torch.from_numpy(sources), length)


def _layer(kind: str, max_slots: int, max_length: int) -> Any:
    if kind == FULL_ATTENTION:
        return SlotLayer(max_slots, max_length)
    # Older versions of transformers have no such layers, and nobody asks them for one.

    return StateLayer(max_slots)


class Rows:
    """The sequences in the slots: tokens by absolute position, and each row's request."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self._experts: list[list[np.ndarray]] = []
        """Where passes sent the tokens of each row that records it, [n, layers, k]; nothing in others."""
        self._kept: list[list[np.ndarray]] = []
        """Kept sets of what was sampled in each row that records them; nothing in other rows."""
        self._rows = np.zeros(0, ROW)
        self._tokens = np.zeros((0, 0), np.int32)
        self._logprobs = np.zeros((0, 0), np.float32)
        self._versions = np.zeros((0, 0), np.int32)
        self._stop_sets: dict[tuple[int, ...], int] = {}
        self._stop_table = np.zeros((0, 1), np.int64)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n], tokens of each row, prompt included."""
        return self._rows["length"]

    @property
    def positions(self) -> np.ndarray:
        """int64 [n], the position of the newest token of each row, which images before it change."""
        positions: np.ndarray = self.lengths - 1 + self._rows["rope_delta"]
        return positions

    @property
    def sampled(self) -> int:
        rows = self._rows
        return int((rows["length"] - rows["prompt"]).sum())

    def controls(self, first: int) -> Controls:
        rows = self._rows[first:]
        names = "temperature", "top_p", "top_k", "min_p", "keep_masks"
        return Controls(**{name: rows[name].copy() for name in names})

    def last_tokens(self) -> np.ndarray:
        """Return int64 [n], the newest token of each row."""
        newest: np.ndarray = self._tokens[np.arange(len(self)), self.lengths - 1]
        return newest.astype(np.int64)

    def tokens(self, first: int, end: int, length: int) -> np.ndarray:
        """Return the first `length` tokens of the rows from `first` to before `end`, int64; behind the end of
        a shorter row they mean nothing."""
        return self._tokens[first:end, :length].astype(np.int64)

    def add(self, requests: Sequence[GenerationRequest], version: int) -> None:
        """Append rows that hold their prompts, whose keys and values are of this version."""
        first = len(self)
        self.requests.extend(requests)
        self._kept.extend([] for _ in requests)
        self._experts.extend([] for _ in requests)
        self._rows = np.append(
            self._rows, np.array([self._row(request, version) for request in requests], ROW)
        )
        self._reserve(len(self), int(self.lengths.max()) + 1)
        for row, request in enumerate(requests, first):
            self._tokens[row, : len(request.token_ids)] = request.token_ids

    def record_experts(self, first: int, routed: Sequence[np.ndarray]) -> None:
        """Append where a pass sent tokens of each row from `first` on, [tokens, layers, k]."""
        for row, experts in enumerate(routed, first):
            if self.requests[row].experts_from is not None:
                self._experts[row].append(experts)

    def record(
        self, first: int, tokens: np.ndarray, logprobs: np.ndarray, version: int,
        kept: Sequence[np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        """Append one sampled token to each row from `first` on, and its kept set."""
        if kept is not None:
            for sets, ids in zip(self._kept[first:], kept, strict=True):
                if len(ids):
                    sets.append(ids)
        self._reserve(len(self), int(self.lengths.max()) + 1)
        rows = np.arange(first, len(self))
        positions = self.lengths[first:]
        self._tokens[rows, positions] = tokens
        self._logprobs[rows, positions] = logprobs
        self._versions[rows, positions] = version
        positions += 1  # a view: the rows' lengths

    def finished(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows (ascending) whose last token ends them, and whether it was a stop token."""
        stopped = (self.last_tokens()[:, None] == self._stop_table[self._rows["stops"]]).any(1)
        rows = np.flatnonzero(stopped | (self.lengths >= self._rows["limit"]))
        return rows, stopped[rows]

    def generation(self, row: int, reason: FinishReason, *, keeps_kv: bool) -> Generation:
        """Return what was sampled in a row so far; `keeps_kv` where updates leave keys and values alone."""
        span = slice(int(self._rows["prompt"][row]), int(self.lengths[row]))
        found = Generation(
            token_ids=self._tokens[row, span].copy(),
            logprobs=self._logprobs[row, span].copy(),
            policy_versions=self._versions[row, span].copy(),
            finish_reason=reason,
            routed_experts=np.concatenate(self._experts[row]) if self._experts[row] else None,
            kept=KeptSets.of(self._kept[row]) if self._kept[row] else None,
        )
        return found.over_kv_of(int(self._rows["version"][row])) if keeps_kv else found

    def remove(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop rows (ascending), filling the holes from the end; return the moves as (targets, sources)."""
        left = len(self) - len(rows)
        targets = rows[rows < left]
        sources = np.setdiff1d(np.arange(left, len(self)), rows, assume_unique=True)
        for target, source in zip(targets, sources, strict=True):
            self.requests[target] = self.requests[source]
            self._kept[target] = self._kept[source]
            self._experts[target] = self._experts[source]
        del self.requests[left:]
        del self._kept[left:], self._experts[left:]
        for array in (self._rows, self._tokens, self._logprobs, self._versions):
            array[targets] = array[sources]
        self._rows = self._rows[:left]
        return targets, sources

    def _row(self, request: GenerationRequest, version: int) -> tuple[int | float | bool, ...]:
        sampling, prompt = request.sampling, len(request.token_ids)
        limit = prompt + sampling.max_new_tokens
        stops = self._stop_set(sampling.stop_token_ids)
        cut = sampling.top_p, sampling.top_k, sampling.min_p, sampling.keep_masks
        return prompt, prompt, limit, rope_delta(request.images), sampling.temperature, *cut, stops, version

    def _stop_set(self, token_ids: tuple[int, ...]) -> int:
        """Return the index of a set of stop tokens in the table, which pads with -1."""
        if token_ids not in self._stop_sets:
            self._stop_sets[token_ids] = len(self._stop_sets)
            width = max(1, *map(len, self._stop_sets))
            self._stop_table = np.array([[*ids, *[-1] * (width - len(ids))] for ids in self._stop_sets])
        return self._stop_sets[token_ids]

    def _reserve(self, slots: int, length: int) -> None:
        have = self._tokens.shape
        if slots <= have[0] and length <= have[1]:
            return
        shape = _doubled(have[0], slots, 1), _doubled(have[1], length, SMALLEST_LENGTH)
        self._tokens = _padded(self._tokens, shape)
        self._logprobs = _padded(self._logprobs, shape)
        self._versions = _padded(self._versions, shape)


def _padded(store: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    padded = np.zeros(shape, store.dtype)
    padded[: store.shape[0], : store.shape[1]] = store
    return padded


def _grown(store: Tensor, slots: int, length: int) -> Tensor:
    """Return a larger copy of `store`, [slots, heads, length, dim]."""
    grown = store.new_zeros(slots, store.shape[1], length, store.shape[3])
    grown[: store.shape[0], :, : store.shape[2]] = store
    return grown


def _doubled(have: int, need: int, smallest: int) -> int:
    """Return `have` if it is enough, else a power of two times it (or `smallest`) that is."""
    size = max(have, smallest)
    while size < need:
        size *= 2
    return size


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]  # transformers is untyped
    """One layer's states, [slots, ...]; a decode step reads and overwrites those of the first rows."""

    def __init__(self, max_slots: int) -> None:
        super().__init__()
        self._max_slots = max_slots
        self._held: dict[str, Tensor] = {}

    def aim(self, cursor: Cursor) -> None:
        """Let the next forward see the states of its rows."""
        for name, held in self._held.items():
            getattr(self, name)[0] = held[: len(cursor.rows)]
            getattr(self, f"is_{name}_initialized")[0] = True
        self.has_previous_state[0] = True

    def fill(self, first: int, prefilled: LinearAttentionLayer, sources: Tensor) -> None:
        """Copy row `sources[i]` of prefilled states to slot `first + i`."""
        for name in STATES:
            states = getattr(prefilled, name)[0]
            if states is not None:  # a convolution alone has one of them
                self._reserve(name, states, first + len(sources))
                self._held[name][first : first + len(sources)] = states[sources]

    def move(self, targets: Tensor, sources: Tensor, length: int) -> None:
        """Copy slots onto others. A state has no length."""
        for held in self._held.values():
            held[targets] = held[sources]

    def _reserve(self, name: str, states: Tensor, slots: int) -> None:
        held = self._held.get(name)
        have = 0 if held is None else len(held)
        if slots <= have:
            return
        grown = states.new_zeros(min(max(slots, 2 * have), self._max_slots), *states.shape[1:])
        if held is not None:
            grown[:have] = held
        self._held[name] = grown
