"""Storage with its waits cut short."""

import pytest

from bus import consume
from storage import dispatcher, reader


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll often, so that a test waits for nothing but what it tests."""
    monkeypatch.setattr(consume, "POLL_S", 0.1)
    monkeypatch.setattr(dispatcher, "POLL_S", 0.05)
    monkeypatch.setattr(dispatcher, "LONG_POLL_S", 0.3)
    monkeypatch.setattr(reader, "RETRY_S", 0.02)
