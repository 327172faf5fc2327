"""A disk that is slow."""

import threading

from bus.errors import BusError
from storage.weights.blob_files import FileBlobs
from storage.weights.tensors import SnapshotContent

TIMEOUT_S = 60


class SlowDisk(FileBlobs):
    """A directory on a disk that takes a piece of a snapshot beside deltas, and the others on demand."""

    def __init__(self, directory):
        super().__init__(directory)
        self.goes_on, self.begun, self.fails = threading.Event(), threading.Event(), False

    async def put(self, content, *tokens, refuses=""):
        if refuses in tokens:
            raise BusError("refused")
        beside = not isinstance(content, list | SnapshotContent)
        return await super().put(self._slowly(content) if beside else content, *tokens)

    def _slowly(self, content):
        for piece in content:
            yield piece
            self.begun.set()
            assert self.goes_on.wait(TIMEOUT_S)
            if self.fails:
                raise OSError(28, "No space left on device")
