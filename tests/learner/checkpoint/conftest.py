import threading

import pytest

from learner.backends.fsdp.checkpoint import StagedShards
from learner.backends.megatron.checkpoint_state import StagedWrites


@pytest.fixture
def held_writer(monkeypatch):
    """Checkpoints are not written before this event is set."""
    release = threading.Event()

    def hold(staged_files):
        write = staged_files.write

        def held(staged):
            assert release.wait(60), "the test never released the writer"
            return write(staged)

        monkeypatch.setattr(staged_files, "write", held)

    hold(StagedWrites)
    hold(StagedShards)
    return release
