"""Connections of the roles of a secured run."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bus.connection import Bus
from storage.settings.weights_transport import HttpTransport
from storage.weights.blob_http import HttpBlobs
from tests.bus.security.secured import As, by_role, lasting_bus, make_streams, remove_streams


@pytest.fixture(scope="module")
def lasting_roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[As]:
    with lasting_bus(tmp_path_factory.mktemp("secured"), "mine") as secure:
        yield by_role(secure)


@pytest.fixture
async def as_role(lasting_roles: As) -> As:
    """Connect to a secured run as one of its roles."""
    await remove_streams(lasting_roles, "mine")
    await make_streams(lasting_roles)
    return lasting_roles


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
