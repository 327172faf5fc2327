"""A text model is published within the multimodal model that it came in, whose other parts stay frozen."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.contract.backend import Exported
from learner.model_directories.lazy_weights import SomeWeights
from learner.model_directories.model_directory import HFWeights, load_whole_config
from storage.model_files.text_model import own_name

_EMBEDDING = "embed_tokens.weight"
TensorStream = Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True, eq=False)
class WholeModel:
    """What multimodal files have around a text model, and the names that this has there."""

    config: PretrainedConfig
    """Configuration of the whole model."""
    rest: SomeWeights
    """Weights of the other parts."""
    names: Mapping[str, str]
    """Names in files by those in the text model."""

    @classmethod
    def of(cls, directory: Path) -> "WholeModel":
        """Read the model from a directory. Raises `ConfigError` for one without readable weights."""
        config, weights = load_whole_config(directory), HFWeights(directory)
        own = {name: own_name(name) for name in weights}
        rest = SomeWeights(weights, [name for name in weights if own[name] is None])
        return cls(config, rest, {text: name for name, text in own.items() if text is not None})

    def name(self, own: str) -> str:
        """Return the name in files of a tensor of the text model."""
        if own in self.names or not own.startswith("model."):
            return self.names.get(own, own)
        prefix = self.names[f"model.{_EMBEDDING}"].removesuffix(_EMBEDDING)  # files have experts as one
        return prefix + own.removeprefix("model.")

    def exported(self, text: Exported) -> Exported:
        """Return what is published of the whole model; the other parts do not change."""
        return replace(
            text,
            shapes={self.name(own): shape for own, shape in text.shapes.items()}
            | {name: self.rest.spec(name).shape for name in self.rest},
            here={self.name(own): view for own, view in text.here.items()},
            rest=_Renamed(self, text.rest),
            pieces=text.pieces
            and [replace(piece, names=[self.name(own) for own in piece.names]) for piece in text.pieces],
            exact={self.name(own): dtype for own, dtype in text.exact.items()} | self.rest.dtypes(),
            unchanging=_WithRest(self, text.unchanging),
        )

    def streamed(self, text: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the text model under the names of files, and the others on rank 0."""
        yield from ((self.name(own), tensor) for own, tensor in text)
        if dist.get_rank() == 0:
            yield from self.rest.items()


@dataclass(frozen=True)
class _Renamed:
    """Yields weights of the text model under the names of files; equal where it yields equal ones."""

    whole: WholeModel
    text: TensorStream

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        return ((self.whole.name(own), tensor) for own, tensor in self.text())


class _WithRest(_Renamed):
    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().__call__()
        yield from self.whole.rest.items()
