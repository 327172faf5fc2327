"""What changed in weights that a server has: a file with those elements, which its own process writes in.

Of an update by Adam at a learning rate of 1e-6 that is a hundredth of all."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actors.engines.sglang.differences import WORTH_IT, gaps_and_words, known, worth_it
from actors.engines.sglang.features import replicas
from actors.engines.sglang.in_server import sluice_changes
from actors.engines.sglang.in_server.sluice_changes import CHANGES, GAPS, VALUES, WHOLE
from actors.engines.sglang.server_facts import drafts, own_draft
from actors.engines.sglang.tensor_files import State, bytes_of, raw
from storage.weights.deltas import changed_positions
from storage.weights.tensors import WORD, Words, spare_threads

APPLY = f"{sluice_changes.__name__.rsplit('.', 1)[1]}.{sluice_changes.apply_2.__name__}"
"""As SGLang names it among its custom weight loaders. Another form of the file is another name."""
Found = tuple[Words, Words]
"""Gaps between the changed elements of a tensor (uint16 [N], see `sluice_changes.GAPS`), and their words [N].

Numpy computes them: torch releases the interpreter in every step and then waits for a busy event loop."""
COPYING = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Model types of which SGLang copies what it loads, by its source: others might compute something of it."""
EXPERTS = ("mixtral", "qwen3_moe")


def takes_changes(server: Mapping[str, Any], model_type: str, *, update_sessions: bool) -> bool:
    """Whether changes may be written into a server's weights: whether it has them as they are loaded.

    Args:
        server: its own settings, as /server_info has them.
        model_type: as config.json has it.
        update_sessions: before and after an update it undoes and redoes what its kernels for experts need."""
    moves_draft = drafts(server) and not own_draft(server)  # it would write them into both, by the same names
    other = any(server.get(name) for name in ("quantization", "cpu_offload_gb"))
    plain = not (replicas(server) > 1 or moves_draft or other)
    known = model_type in COPYING and (update_sessions or model_type not in EXPERTS)
    return plain and known and APPLY in (server.get("custom_weight_loader") or ())


@dataclass(frozen=True, slots=True)
class Changes:
    """The content of a file for `sluice_changes.apply_2`."""

    tensors: State
    metadata: Mapping[str, str]


def changes(old: State, new: State) -> Changes | None:
    """What makes `new` of `old`, which has all of its tensors with the same shapes and dtypes.

    `None` where writing all of `new` is as good, or is the only way: a NaN cannot be told from no change."""
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


def _differences(old: State, new: State) -> dict[str, Found]:
    """What changed, in the order of `new`, but for tensors that go whole."""
    found = {name: known(old[name], tensor) for name, tensor in new.items() if not _goes_whole(tensor)}
    untold = [name for name, parts in found.items() if parts is None]
    if untold:
        untold.sort(key=lambda name: new[name].nbytes, reverse=True)  # no large one comes last
        with ThreadPoolExecutor(spare_threads(), "changes") as threads:
            found |= threads.map(lambda name: (name, _compared(old[name], new[name])), untold)
    return {name: parts for name, parts in found.items() if parts is not None}


def _compared(old: torch.Tensor, new: torch.Tensor) -> Found | None:
    """As `known`, of tensors that came in any way; `None` where more changed than may be written alone."""
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
    """One after the other, as elements of `dtype`.

    In memory that numpy makes, since it asks the system for large pages, but by torch, in one step."""
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
