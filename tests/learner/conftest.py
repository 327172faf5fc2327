import gc
from collections.abc import Iterator

import pytest
import torch

from learner.backends.factory import close_world, init_world
from tests.learner.mini_run import in_one_process
from tests.learner.worlds import Worlds


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """A world of this one process, which megatron-core needs to exist."""
    torch.set_num_threads(1)
    init_world()
    yield
    gc.collect()  # trainers are garbage in cycles, and keep the threads of the world's groups
    gc.freeze()  # megatron-core collects garbage at each checkpoint: what is left is none
    close_world()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner and its shadow may run in the test's own process."""
    in_one_process(monkeypatch)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """Worlds of several processes, which tests divide as they like; idle ones keep both cores busy."""
    with Worlds() as worlds:
        yield worlds
