"""Storage with its waits cut short."""

import pytest

from bus import consume, roles
from bus.connection import Bus
from storage import dispatcher, reader
from tests.storage.serving import LearnerStandIn


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll often, so that a test waits for nothing but what it tests."""
    monkeypatch.setattr(consume, "POLL_S", 0.1)
    monkeypatch.setattr(dispatcher, "POLL_S", 0.05)
    monkeypatch.setattr(dispatcher, "LONG_POLL_S", 0.3)
    monkeypatch.setattr(reader, "RETRY_S", 0.02)


@pytest.fixture
def quick_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder of a role that is gone is noticed at once."""
    monkeypatch.setattr(roles, "RENEW_S", 0.1)


@pytest.fixture
def learner(bus: Bus) -> LearnerStandIn:
    return LearnerStandIn(bus)
