"""Commands that pages show."""

from collections.abc import Iterator

from cyclopts import App
from pydantic import BaseModel

from launch.settings.run_config import RunConfig


def all_commands(app: App, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in app:
        if not name.startswith("-"):
            below = list(all_commands(app[name], (*above, name)))
            yield from below or [(*above, name)]


def fields(section: object) -> dict[str, object]:
    """The settings of a table; of a union, those of all its members."""
    parts = [section, *getattr(section, "__args__", ())]
    models = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    nested = [name for part in parts[1:] for name in fields(part).items()]
    return dict(nested) | {
        name: field.annotation for model in models for name, field in model.model_fields.items()
    }


def exists(setting: str) -> bool:
    """Tell whether a dotted name leads through the schema; tables with free keys take any."""
    section: object = RunConfig
    for name in setting.split("."):
        if getattr(section, "__origin__", None) is dict:
            return True
        below = fields(section)
        if name not in below:
            return False
        section = below[name]
    return True
