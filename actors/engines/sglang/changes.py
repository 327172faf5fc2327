"""The elements that changed in weights which a server has, as a file whose content its own process writes in.

An update by Adam at a learning rate of 1e-6 changes a hundredth of all elements. Where they lie is known from
the delta in which the weights came: engines of this process share the tensors, and each would have to compare
all of them otherwise."""

import json
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from actors.engines.sglang.client.server_facts import drafts, own_draft
from actors.engines.sglang.client.tensor_files import State, bytes_of, raw
from actors.engines.sglang.in_server.sluice_changes import APPLY, CHANGES, GAP_BITS, GAPS, VALUES, WHOLE
from actors.engines.sglang.server.gpu_count import replicas
from storage.model_files.families import family_named
from storage.weights.deltas import Moved, Positions, changed_positions
from storage.weights.tensors import WORD, Words, spare_threads

Found = tuple[Words, Words]
"""Gaps between the changed elements of a tensor (uint16 [N], see `sluice_changes.GAPS`), and their words [N].
Numpy computes them: torch releases the interpreter in every step and then waits for a busy event loop."""
GAP = np.dtype(np.uint16)
FARTHEST = GAP_BITS + 1
"""Largest step from one element of a file to the next: a gap holds no larger one."""
WORTH_IT = 0.5
"""What changes may take of the space of the whole."""


class _Difference(NamedTuple):
    old: "weakref.ref[Words]"
    new: "weakref.ref[Words]"
    gaps: Words
    values: Words


_noted: dict[int, _Difference] = {}
"""Differences by the address of the new words, as long as these live."""


def worth_it(size_bytes: int, itemsize: int) -> int:
    """Return how many changed elements of a tensor may be written alone: each takes a gap and itself."""
    return int(WORTH_IT * size_bytes / (GAP.itemsize + itemsize))


def note(old: Words, new: Words, moved: Sequence[Moved]) -> None:
    """Remember the words that are others in `new`, and how many lie between each and the one before it.
    Nobody writes to either from now on."""
    gaps, values = _joined(new, moved)
    if len(gaps) > worth_it(new.nbytes, new.itemsize):
        return  # then all are written
    address = new.ctypes.data
    _noted[address] = _Difference(weakref.ref(old), weakref.ref(new), gaps, values)
    weakref.finalize(new, _noted.pop, address, None).atexit = False


def gaps_and_words(words: Words, positions: Positions, before: int = -1) -> Found:
    """Return how a file tells of the words at `positions`: the gaps, the first counted from `before`, and the
    words. Where a gap would be too wide words in between are told of too, as they are. In embeddings rows of
    tokens that were never seen make such gaps."""
    positions = _in_reach(positions, before)
    return (np.diff(positions, prepend=before) - 1).astype(GAP), words[positions]


def _in_reach(positions: Positions, before: int) -> Positions:
    """Put further positions in where a step would be too wide."""
    steps = np.diff(positions, prepend=before)
    missing = (steps - 1) // FARTHEST
    far = np.flatnonzero(missing)
    counts = missing[far]
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    between = np.repeat(positions[far] - steps[far], counts) + nth * FARTHEST
    return np.sort(np.concatenate([positions, between])) if len(far) else positions


def _joined(new: Words, moved: Sequence[Moved]) -> Found:
    """Return what a file tells of all parts together."""
    all_gaps, all_values, last = [], [], -1
    for part in moved:
        if not len(part.gaps):
            continue
        first, values = part.start + int(part.gaps[0]) - last - 1, part.words
        if max(first, int(part.gaps.max())) < FARTHEST:
            gaps = part.gaps.astype(GAP)
            gaps[0] = first
        else:
            gaps, values = gaps_and_words(new, part.positions, last)
        all_gaps.append(gaps)
        all_values.append(values)
        last = part.last
    return np.concatenate(all_gaps), np.concatenate(all_values)


def known(old: torch.Tensor, new: torch.Tensor) -> Found | None:
    """Return the gaps (uint16) and words, where `new` came as what changed in `old`. `old` and `new` lie in
    the memory of what came."""
    found = _noted.get(new.data_ptr())
    if found is None or not (old.is_contiguous() and new.is_contiguous()):
        return None
    words = found.old(), found.new()
    at = [(w.ctypes.data, w.nbytes) for w in words if w is not None]
    same = at == [(tensor.data_ptr(), tensor.nbytes) for tensor in (old, new)]
    return (found.gaps, found.values) if same else None


def takes_changes(server: Mapping[str, Any], model_type: str, *, update_sessions: bool) -> bool:
    """Return whether changes may be written into a server's weights: whether it has them as they are loaded.

    Args:
        server: its own settings, as /server_info has them.
        model_type: as config.json has it.
        update_sessions: before and after an update it undoes and redoes what its kernels for experts need."""
    moves_draft = drafts(server) and not own_draft(server)  # SGLang would write into both, by the same names
    other = any(server.get(name) for name in ("quantization", "cpu_offload_gb"))
    plain = not (replicas(server) > 1 or moves_draft or other)
    copied = family_named(model_type).sglang_copies in (
        "always",
        *(("in_sessions",) if update_sessions else ()),
    )
    return plain and copied and APPLY in (server.get("custom_weight_loader") or ())


@dataclass(frozen=True, slots=True)
class Changes:
    """The content of a file for `sluice_changes.apply_2`."""

    tensors: State
    metadata: Mapping[str, str]


def changes(old: State, new: State) -> Changes | None:
    """Return what makes `new` of `old`, which has all of its tensors with the same shapes and dtypes. `None`
    where writing all of `new` is as good, or is the only way: a NaN cannot be told from no change."""
    found = _differences(old, new)
    tensors = {WHOLE + name: new[name] for name in new if name not in found}
    entries = {}
    for dtype in {tensor.dtype for tensor in new.values()}:
        kind = str(dtype).removeprefix("torch.")
        of_dtype = {name: parts for name, parts in found.items() if new[name].dtype == dtype}
        if of_dtype:
            entries[kind] = [[name, list(new[name].shape), len(gaps)] for name, (gaps, _) in of_dtype.items()]
            tensors[GAPS + kind] = _concatenated([gaps for gaps, _ in of_dtype.values()], torch.int16)
            tensors[VALUES + kind] = _concatenated([words for _, words in of_dtype.values()], dtype)
    if bytes_of(tensors) > WORTH_IT * bytes_of(new) or any(map(_has_nan, tensors.values())):
        return None
    return Changes(tensors, {CHANGES: json.dumps(entries)})


def whole(state: State) -> Changes:
    """Return what makes all of these tensors, whatever was before."""
    return Changes({WHOLE + name: tensor for name, tensor in state.items()}, {CHANGES: "{}"})


def _differences(old: State, new: State) -> dict[str, Found]:
    """Return what changed, in the order of `new`, but for tensors that go whole."""
    found = {name: known(old[name], tensor) for name, tensor in new.items() if not _goes_whole(tensor)}
    untold = [name for name, parts in found.items() if parts is None]
    if untold:
        untold.sort(key=lambda name: new[name].nbytes, reverse=True)  # no large tensor comes last
        with ThreadPoolExecutor(spare_threads(), "changes") as threads:
            found |= threads.map(lambda name: (name, _compared(old[name], new[name])), untold)
    return {name: parts for name, parts in found.items() if parts is not None}


def _compared(old: torch.Tensor, new: torch.Tensor) -> Found | None:
    """Compare two tensors that came in any way; return None where more changed than may be written alone."""
    at_most = worth_it(new.nbytes, new.itemsize)
    found = changed_positions(_words(old), _words(new), at_most=at_most)
    if found is None:
        return None
    gaps, values = gaps_and_words(_words(new), found)
    return (gaps, values) if len(gaps) <= at_most else None


def _goes_whole(tensor: torch.Tensor) -> bool:
    """One element does: models fill scalars in, which is not copying."""
    return not tensor.dtype.is_floating_point or tensor.numel() < 2


def _concatenated(arrays: Sequence[Words], dtype: torch.dtype) -> torch.Tensor:
    """Return the arrays one after the other, as elements of `dtype`. In memory that numpy makes, since it
    asks the system for large pages, but by torch, in one step."""
    kind = f"i{dtype.itemsize}"
    joined = torch.from_numpy(np.empty(sum(map(len, arrays)), kind))
    torch.cat([torch.from_numpy(array.view(kind)) for array in arrays], out=joined)
    return joined.view(dtype)


def _has_nan(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    wide = tensor if tensor.itemsize > 1 else tensor.half()  # torch has no largest one of 8 bits
    return bool(wide.max().isnan())  # ten times as fast as looking at each


def _words(tensor: torch.Tensor) -> Words:
    return raw(tensor).numpy().view(WORD[tensor.itemsize])
