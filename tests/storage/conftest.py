"""Storage with its waits cut short."""

import pytest

from bus.connection import Bus, roles
from storage.client import reader
from tests.storage.serving import LearnerStandIn


@pytest.fixture
def quick(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers try again soon, too."""
    monkeypatch.setattr(reader, "RETRY_S", 0.02)


@pytest.fixture
def quick_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder of a role that is gone is noticed at once."""
    monkeypatch.setattr(roles, "RENEW_S", 0.1)


@pytest.fixture
def learner(bus: Bus) -> LearnerStandIn:
    return LearnerStandIn(bus)
