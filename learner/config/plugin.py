"""Setting that names a function of the user's. Loads without torch."""

from typing import Literal

from pydantic import Field

from bus.config import Config


class Plugin(Config):
    """A function of the user's own, with the signature of the built-in ones."""

    type: Literal["plugin"] = "plugin"
    """Name of the choice."""

    function: str
    """The function, as `my_pkg.my_module:function`; the working directory counts."""

    settings: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Keyword arguments that the function gets besides."""
