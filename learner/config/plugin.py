"""Bases of settings that stand for a function: built in, or the user's own. Loads without torch."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config


class Choice(Config):
    """Base of the choices of an algorithm. Its class is the record of a choice: what others go by about it,
    besides its settings, lies here as class variables, whose defaults suit a function that nobody knows."""

    type: str
    """Name of the choice."""
    computed_by: ClassVar[str]
    """The built-in function, as `module:function`, which is called with the settings. The name is text,
    because settings load without torch."""
    read_elsewhere: ClassVar[tuple[str, ...]] = ()
    """Settings that something else than the function goes by."""


@dataclass(frozen=True, slots=True)
class Picking:
    """Says how tokens are picked over a whole update, before its forward pass
    (learner/algorithms/selection.py)."""

    stream: str
    """Stream that marks the tokens that were picked."""
    computed_by: str
    """The function that picks, as `module:function`."""
    settings: tuple[str, ...]
    """Settings of the choice that this function is called with."""


class Plugin(Config):
    """A function of the user's own, with the signature of the built-in ones."""

    type: Literal["plugin"] = "plugin"
    function: str
    """The function, as `my_pkg.my_module:function`; the working directory counts."""
    settings: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Keyword arguments that the function gets besides."""


class HookConfig(Config):
    """A function of the user's own, plain or `async`, that every rank calls once a step."""

    function: str | None = None
    """The function, as `my_pkg.my_module:function`; the working directory counts. `None` calls nothing."""
    settings: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Keyword arguments that the function gets besides."""
    timeout_s: float = Field(300.0, gt=0)
    """Longest time that an `async` function may take; then the learner ends."""

    @model_validator(mode="after")
    def _settings_have_a_function(self) -> Self:
        if self.settings and self.function is None:
            raise ValueError("settings are for a function, and none is named: set function as well")
        return self

    @property
    def plugin(self) -> Plugin | None:
        """Return the function with its settings, if one is named."""
        return None if self.function is None else Plugin(function=self.function, settings=self.settings)


NO_HOOK = HookConfig()
