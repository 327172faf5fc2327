"""Text models inside multimodal ones (storage/model_files/text_model.py): their weights, and directories of
them alone."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from bus.errors import ConfigError, listed
from learner.model_directories.lazy_weights import (
    ChangedWeights,
    LazyWeights,
    Spec,
    misfits,
    part_of,
    renamed_weights,
)
from storage.model_files.families import family_named
from storage.model_files.text_model import is_multimodal, own_name

_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")


def text_weights(weights: LazyWeights, text: PretrainedConfig) -> LazyWeights:
    """Return weights of the text model by its own names; `weights` are all of its files, or of a multimodal
    model's. Those of a model that is trained as a whole, whose configuration is not `text`, are returned."""
    if text.get_text_config() is text and is_multimodal(weights):
        names = {own: name for name in weights if (own := own_name(name)) is not None}
        weights = renamed_weights(weights, names)
    return _EachExpert(weights) if family_named(text.model_type).stacks_experts else weights


class _EachExpert(ChangedWeights):
    """Weights with a tensor of each expert's gate, up and down, where files have one tensor of all. Those are
    [experts, gate and up, inputs] and [experts, outputs, inputs]."""

    def __init__(self, weights: LazyWeights) -> None:
        self._places: dict[str, tuple[str, int, slice]] = {}
        """Name of the stack, number of the expert and its rows, by the names of single tensors."""
        made: dict[str, Spec] = {}
        names = chain.from_iterable(self._parts(name, weights, made) for name in weights)
        super().__init__(weights, dict.fromkeys(names), made)

    def _parts(self, name: str, weights: LazyWeights, made: dict[str, Spec]) -> Iterator[str]:
        stack = _STACKED_EXPERTS.fullmatch(name)
        if stack is None:
            yield name
            return
        (experts, rows, inputs), dtype = weights.spec(name)
        halves = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
        parts = halves if stack[2] == "gate_up_proj" else {"down_proj": slice(0, rows)}
        for expert in range(experts):
            for part, place in parts.items():
                own = f"{stack[1]}{expert}.{part}.weight"
                self._places[own] = name, expert, place
                made[own] = Spec((place.stop - place.start, inputs), dtype)
                yield own

    def make(self, name: str) -> Tensor:
        stack, expert, rows = self._places[name]
        return part_of(self._weights, stack, 0, expert, expert + 1)[0, rows]


def saved_shapes(hf_config: PretrainedConfig, form: Any = AutoModelForCausalLM) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that transformers saves of a model of this form, by name."""
    with torch.device("meta"):
        model = form.from_config(hf_config)
    tied = model.all_tied_weights_keys
    saved = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in saved.items() if name not in tied}


def refuse_other_tensors(source: Path, text: PretrainedConfig, weights: LazyWeights) -> None:
    """Raise `ConfigError` with the tensors that the text model lacks, or has in another shape."""
    if problems := list(misfits(saved_shapes(text), weights, lambda _: True)):
        raise ConfigError(f"the text model in {source} is not what its config.json says:\n{listed(problems)}")
