"""`--print-config`: the settings of a run with the origin of each, as TOML or as JSON."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from bus.config import URL_VARIABLE, Config
from launch.settings.run_config import RunConfig
from launch.settings.sources import DEFAULT, Location, Origins, Source, leaves
from launch.settings.toml import commented, document, setting
from launch.settings.tree import may_be_none

HIDDEN = "***@"
"""What stands for user and password in an address."""


def printed_toml(config: RunConfig, sources: Sequence[Source]) -> str:
    """Return the settings as a file that `--config` takes, with each one's origin in a comment.

    A setting without a value and one with a password, which no file may hold, are comments as a whole."""
    origins = Origins(sources)

    def write(location: Location, value: Any) -> Iterator[str]:
        origin, line = origins.of(location), setting(location[-1], value)
        if isinstance(value, str) and HIDDEN in value:
            yield commented(f"# {line}", f"{origin}; give it with its password in {URL_VARIABLE}")
        elif location == ("bus", "url") and origin == DEFAULT:
            yield commented(f"# {line}", f"{origin}; `launch local` starts a bus where none is named")
        elif chosen := _chosen_here(config, location):
            yield commented(line, f"{origin}; {chosen}")
        elif value is None and (origin == DEFAULT or not may_be_none(RunConfig, location)):
            yield commented(f"# {line}", origin)
        else:
            yield commented(line, origin)

    return "\n".join(document(config.model_dump(mode="json"), write))


def printed_json(config: RunConfig, sources: Sequence[Source]) -> str:
    """Return one object: `settings`, `origins` by the name of each setting, such as `learner.steps`, and
    `chosen`, what is used where the choice is `auto`."""
    origins = Origins(sources)
    settings = json.loads(config.model_dump_json())
    named = {".".join(location): origins.of(location) for location, _ in leaves(settings)}
    chosen = {".".join(location): json.loads(used.model_dump_json()) for location, used in _choices(config)}
    return json.dumps({"settings": settings, "origins": named, "chosen": chosen})


def _choices(config: RunConfig) -> list[tuple[Location, Config]]:
    """Return what the objective uses where its settings leave the choice to the papers, by table."""
    learner = config.learner
    of_tables = {
        "correction": (learner.correction, learner.used_correction),
        "aggregation": (learner.aggregation, learner.used_aggregation),
    }
    return [(("learner", name), used) for name, (given, used) in of_tables.items() if given != used]


def _chosen_here(config: RunConfig, location: Location) -> str:
    """Return what a choice of `auto` is in this run; nothing at any other setting."""
    used = dict(_choices(config)).get(location[:-1]) if location[-1] == "type" else None
    if used is None:
        return ""
    settings = used.model_dump(exclude={"type"}, exclude_none=True)
    return f"here {', '.join([used.model_dump()['type'], *(f'{k} = {v}' for k, v in settings.items())])}"
