"""Connections of the roles of a secured run."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus.connection import Bus
from storage.settings.weights_transport import HttpTransport
from storage.weights.blob_http import HttpBlobs
from tests.bus.security.secured import As, by_role, make_streams, secured_bus


@pytest.fixture
async def as_role(tmp_path: Path) -> AsyncIterator[As]:
    """Connect to a secured run as one of its roles."""
    async with secured_bus(tmp_path, "mine") as (secure, _):
        await make_streams(by_role(secure))
        yield by_role(secure)


@pytest.fixture
async def learner(as_role: As) -> AsyncIterator[Bus]:
    async with as_role("learner") as bus:
        yield bus


@pytest.fixture
async def actor(as_role: As) -> AsyncIterator[Bus]:
    async with as_role("actor") as bus:
        yield bus


@pytest.fixture
async def origin(learner: Bus, tmp_path: Path) -> AsyncIterator[HttpBlobs]:
    """The learner's server of weights."""
    store = HttpBlobs(learner, tmp_path / "origin", HttpTransport())
    await store.start()
    yield store
    await store.close()
