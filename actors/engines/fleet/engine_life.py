"""One engine of a fleet from its building to its end."""

import asyncio
from dataclasses import dataclass, field

from actors.engines.base import Engine, Generation


@dataclass(eq=False)
class EngineLife:
    """State of an engine; the next engine of the same place in the fleet gets a new one."""

    engine: Engine
    serial: int = 0
    """The update it has; 0 for the weights that it came with."""
    errors: int = 0
    """Requests that failed in a row."""
    failed_under: int | None = None
    """Requests that it may have failed of; None when it has not failed."""
    ending: set[asyncio.Task[Generation]] = field(default_factory=set)
    """Requests whose callers are gone, until it has aborted them."""
    update: asyncio.Lock = field(default_factory=asyncio.Lock)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it was closed: nothing comes from it any more."""
