"""Reads the prompts of a run: those it trains on, and those it measures with."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from bus.errors import ConfigError
from bus.messages import Prompt
from storage.built_in_tasks.generators import generate_task
from storage.disk.run_directory import RunDirectory
from storage.prompt_files.dataset import each_prompt, load_prompts
from storage.prompt_files.stored_prompts import StoredPrompts
from storage.prompts.mixture import PromptSource
from storage.prompts.sources import with_choices
from storage.prompts.training_prompts import training_prompts
from storage.settings.data import DataConfig
from storage.settings.evaluation import EvaluationSetConfig


@dataclass(frozen=True)
class Prompts:
    """What a run trains on and measures with."""

    training: StoredPrompts
    heldout: list[Prompt]
    source: str
    """Where those to train on come from, for a human."""
    sources: tuple[PromptSource, ...] = ()
    """Sources that are mixed, whose prompts follow one another in `training`."""
    sets: dict[str, list[Prompt]] = field(default_factory=dict)
    """Further held-out prompts, by the name of their data set."""

    @property
    def measured(self) -> dict[str, list[Prompt]]:
        """Return all held-out prompts, by what a human calls them."""
        named = {f"evaluation.sets {name!r}": found for name, found in self.sets.items()}
        return {"held-out prompts": self.heldout, **named}


def read_prompts(
    data: DataConfig, run: RunDirectory, seed: int, evaluation_sets: Iterable[EvaluationSetConfig] = ()
) -> Prompts:
    """Read the prompt files, writing them first where the configuration names a task instead.

    Those to train on are copied into `run` and stay on disk. Raises `ConfigError` for whatever is wrong
    with them; a run that is new leaves nothing then.
    """
    with run.unmade_on_error():
        return _read_prompts(data, run, seed, evaluation_sets)


def _read_prompts(
    data: DataConfig, run: RunDirectory, seed: int, evaluation_sets: Iterable[EvaluationSetConfig]
) -> Prompts:
    training, heldout = data.prompts, data.heldout
    if training is None and data.task is not None and not data.sources:
        files = generate_task(data.task, run.data, seed=seed)
        training, heldout = files.prompts, heldout or files.heldout
    if training is None and not data.sources:
        raise ConfigError(
            "no prompts: give --prompts FILE, data.sources, or --data.task sort for a generated task"
        )
    measured = load_prompts(heldout, data.keys) if heldout else []
    sets = {
        one.name: list(with_choices(each_prompt(one.prompts, data.keys), one.reward, one.environment))
        for one in evaluation_sets
    }
    stored, sources = training_prompts(training or data.sources, data.keys, run.data)  # takes longest
    names = str(training) if training else " and ".join(str(one.prompts) for one in data.sources)
    return Prompts(stored, measured, names, sources, sets)
