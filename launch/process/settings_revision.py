"""Which settings of a run a process works by, and which the run has by now.

Storage that is started again with other settings is refused while a learner, an actor or `launch shards`
reads them and goes on. What was not seen then is named: a process keeps the settings that it joined with,
names those that are others now in its log and its status, and takes them when it is started again."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import structlog

from bus.connection.bus import Bus
from bus.connection.roles import living_holder
from bus.connection.status import PERIOD_S as STATUS_PERIOD_S
from bus.errors import BusError, ConfigError, SchemaError
from bus.messages import RunRecord, Status
from launch.settings.run_config import RunConfig, resolve
from launch.settings.sources import by_name

log = structlog.get_logger()
PERIOD_S = 5.0
"""Time between two looks at the run's record; longer in a run of many actors."""
LISTENING_PERIODS = 4
"""Periods of statuses in which whoever is alive is heard."""
SHOWN = 8
"""Most settings that are named."""
REMEDY = "start this process again: it goes on by the settings that it joined with"
READ_BY = {
    "learner": ("seed", "data", "admission", "replay", "sampling", "model", "warmup", "learner", "evaluation",
                "actors", "colocation", "policies"),
    "shadow": ("seed", "model", "warmup", "learner"),
    "actors": ("admission", "replay", "sampling", "model", "evaluation", "actors", "colocation", "policies"),
    "shards": ("replay",),
}  # fmt: skip
"""Sections of a run's settings that a process of each role reads."""
READERS = {"learner": "learner", "actor": "actors", "shards": "shards"}
"""Roles of statuses that storage hears, and whose settings those processes read."""


def revision_of(config_json: str) -> str:
    """Return a short digest of a run's settings, whatever the order of their keys."""
    canonical = json.dumps(json.loads(config_json), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


async def refuse_unapplied(bus: Bus, config: RunConfig) -> None:
    """Raise `ConfigError` for settings that differ from those of the run's record and that a living learner,
    actor or `launch shards` reads: it would go on by the others. It is so where its own flags set them, too.
    """
    try:
        found = await bus.get("run", RunRecord)
        before = config if found is None else resolve(json.loads(found[0].config_json), {}, {})
    except (ConfigError, SchemaError) as error:  # of another build: there is nothing to compare
        log.info("settings_not_compared", reason=str(error))
        return
    words = "in the run", "here"
    changed = {role: differences(before, config, read_by, words) for role, read_by in READERS.items()}
    if not any(changed.values()):
        return
    alive: dict[str, str] = {}

    def hear(role: str, status: Status) -> None:  # by the subject: only the role's processes may write there
        alive[role] = status.source

    hearing = [await bus.listen(bus.subject("status", role), Status, partial(hear, role)) for role in READERS]
    await asyncio.sleep(LISTENING_PERIODS * STATUS_PERIOD_S * bus.slower)
    for one in hearing:
        await one.unsubscribe()
    if "learner" not in alive and (holder := await living_holder(bus, "learner")) is not None:
        alive["learner"] = f"the learner (process {holder.pid} on {holder.host})"  # still builds its model
    for role, source in alive.items():
        if settings := changed[role]:
            raise ConfigError(
                f"{source} is alive and would go on by other settings: {'; '.join(_named(settings))}. Stop "
                "it, start storage, and then start it again; or start storage with the settings of the run"
            )


def differences(
    own: RunConfig, now: RunConfig, role: str, words: tuple[str, str] = ("here", "in the run")
) -> list[str]:
    """Return each setting that `role` reads and that is another now, with both values and where they are."""
    read = set(READ_BY.get(role, ()))
    before, after = (by_name(config.model_dump(mode="json", include=read)) for config in (own, now))
    return [
        f"{name}: {_shown(before, name)} {words[0]}, {_shown(after, name)} {words[1]}"
        for name in {**before, **after}
        if before.get(name, "none") != after.get(name, "none")
    ]


async def follow_settings(bus: Bus, role: str, own: RunConfig, resolved: Callable[[str], RunConfig]) -> None:
    """Keep `bus.state.settings_differ` true until cancelled. `resolved` makes this process's settings of a
    record of the run."""
    seen: str | None = None
    while True:
        await asyncio.sleep(PERIOD_S * bus.slower)
        try:
            found = await bus.get("run", RunRecord)
        except (BusError, SchemaError) as error:  # the bus is away, or its storage is about to announce it
            log.debug("settings_not_seen", reason=str(error))
            continue
        if found is None or found[0].config_json == seen:
            continue
        seen = found[0].config_json
        bus.state.settings_differ = _named(_compared(own, seen, role, resolved))
        if bus.state.settings_differ:
            log.warning("settings_differ", settings=list(bus.state.settings_differ), remedy=REMEDY)


def _compared(
    own: RunConfig, config_json: str, role: str, resolved: Callable[[str], RunConfig]
) -> Sequence[str]:
    try:
        return differences(own, resolved(config_json), role)
    except ConfigError as error:  # of another build, or they do not go with this process's own settings
        return [f"the run's settings do not go with those of this process: {error}"]


def _named(found: Sequence[str]) -> tuple[str, ...]:
    more = (f"and {len(found) - SHOWN} more",) if len(found) > SHOWN else ()
    return (*found[:SHOWN], *more)


def _shown(values: dict[str, Any], name: str) -> str:
    return json.dumps(values[name])[:80] if name in values and values[name] is not None else "none"
