from collections.abc import Iterator

import pytest
import torch

from bus import consume
from learner import service, shadow
from learner.parallel import close_world, init_world
from storage import dispatcher, reader


@pytest.fixture(scope="session", autouse=True)
def world() -> Iterator[None]:
    """A world of this one process, which megatron-core needs to exist."""
    torch.set_num_threads(1)
    init_world()
    yield
    close_world()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner may run in the test's own process, with waits cut short."""
    for module in (service, shadow):
        monkeypatch.setattr(module, "init_world", lambda: None)
    monkeypatch.setattr(shadow, "POLL_S", 0.02)
    monkeypatch.setattr(consume, "POLL_S", 0.1)
    monkeypatch.setattr(dispatcher, "POLL_S", 0.05)
    monkeypatch.setattr(dispatcher, "LONG_POLL_S", 0.3)
    monkeypatch.setattr(reader, "RETRY_S", 0.02)
