"""Prompts of a recipe, as rows of the files that a run reads."""

from collections.abc import Mapping, Sequence

from bus.config import Json

PromptRow = Mapping[str, Json]
PromptFiles = Mapping[str, Sequence[PromptRow]]
"""Rows by the name of their file, without its ending: `prompts`, `heldout` and further sets."""
