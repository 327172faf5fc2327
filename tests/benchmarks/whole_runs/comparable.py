"""The settings by which outcomes of whole runs are told to be comparable."""

import json

from bus.codec import Json
from launch.settings.run_config import RunConfig

NAMED_BY_CELL = ("run", "directory", "seed", "bus", "monitoring", "allow", "supervision")
"""Sections that each cell has of its own, or that change no outcome."""


def comparable_settings(settings: RunConfig) -> str:
    """Return as JSON the settings that are not the defaults, but for those that each cell has of its own.

    Defaults are left out, so that outcomes stay comparable when a later build has further settings. The type
    of a table is named where it is not the default, since two types may differ in nothing else."""
    own = set(NAMED_BY_CELL)
    chosen = json.loads(settings.model_dump_json(exclude=own, exclude_defaults=True))
    whole = json.loads(settings.model_dump_json(exclude=own))
    return json.dumps(_with_types(chosen, whole, json.loads(RunConfig().model_dump_json())), sort_keys=True)


def _with_types(chosen: Json, whole: Json, default: Json) -> Json:
    """Return what was chosen, with the types of its tables, which their own defaults hide."""
    if isinstance(chosen, list) and isinstance(whole, list):
        return [_with_types(one, all_of_it, None) for one, all_of_it in zip(chosen, whole, strict=True)]
    if not isinstance(chosen, dict) or not isinstance(whole, dict):
        return chosen
    usual = default if isinstance(default, dict) else {}
    found = {name: _with_types(value, whole[name], usual.get(name)) for name, value in chosen.items()}
    if "type" in whole and whole["type"] != usual.get("type"):
        found["type"] = whole["type"]
    return found
