"""Tells which weights are trained, and which stay as they are, by their Hugging Face names."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bus.errors import ConfigError


@dataclass(frozen=True)
class TrainableWeights:
    """Regular expressions, searched in names; without any, everything is trained."""

    freeze: tuple[str, ...] = ()
    """Weights that match one of these are not trained."""
    train_only: tuple[str, ...] = ()
    """If there are any, only weights that match one of these are trained."""

    def frozen(self, parts: Mapping[str, Sequence[str]]) -> set[str]:
        """Return which tensors of a model are not trained, of those in `parts` with the names in files that
        each is made of.

        Raises `ConfigError` for an expression that is malformed or matches nothing, for one that takes
        apart what is one tensor in the model, and when nothing is left to train."""
        if not self.freeze and not self.train_only:
            return set()
        names = [part for of_tensor in parts.values() for part in of_tensor]
        freeze = _compiled("model.freeze", self.freeze, names)
        train_only = _compiled("model.train_only", self.train_only, names)

        def trained(name: str) -> bool:
            wanted = not train_only or any(expression.search(name) for expression in train_only)
            return wanted and not any(expression.search(name) for expression in freeze)

        kept = {tensor for tensor, of_tensor in parts.items() if _all_or_none(of_tensor, trained)}
        if not kept:
            raise ConfigError(
                f"nothing is left to train: model.freeze={list(self.freeze)} and "
                f"model.train_only={list(self.train_only)} freeze every weight"
            )
        return parts.keys() - kept


EVERYTHING = TrainableWeights()


def refuse_other_frozen(directory: Path, saved: Iterable[str], ours: set[str]) -> None:
    """Raise `ConfigError` where a checkpoint was trained with other weights frozen than the run has."""
    if frozen := set(saved) ^ ours:
        raise ConfigError(
            f"checkpoint {directory} was trained with other weights frozen ({len(frozen)} differ, as "
            f"{min(frozen)}): its optimizer does not fit; keep model.freeze and model.train_only, or start a "
            "new run from its weights with --model.path"
        )


def _compiled(setting: str, expressions: Sequence[str], names: Sequence[str]) -> list[re.Pattern[str]]:
    compiled = []
    for expression in expressions:
        try:
            pattern = re.compile(expression)
        except re.error as error:
            raise ConfigError(f"{setting}: {expression!r} is no regular expression: {error}") from error
        if not any(pattern.search(name) for name in names):
            raise ConfigError(f"{setting}: {expression!r} matches no weight; there are {_some(names)}")
        compiled.append(pattern)
    return compiled


def _all_or_none(parts: Sequence[str], trained: Callable[[str], bool]) -> bool:
    kept = [part for part in parts if trained(part)]
    if kept and len(kept) < len(parts):
        frozen = [part for part in parts if part not in kept]
        raise ConfigError(
            f"{', '.join(kept)} would be trained and {', '.join(frozen)} not, but in the model they are one "
            "tensor: freeze all of them or none"
        )
    return bool(kept)


def _some(names: Sequence[str]) -> str:
    """Return the names of the first layer and of what lies beside the layers; other layers are like it."""
    return ", ".join(name for name in names if ".layers." not in name or ".layers.0." in name)
