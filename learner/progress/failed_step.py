"""Notes at which step training failed, so that the same failure after a restart ends the run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bus.errors import ConfigError, TrainingError
from storage.disk.atomic_files import write_json


class FailedStep:
    """The step at which an earlier start of the learner failed, in a file that all ranks see."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._before = json.loads(file.read_text())["step"] if file.exists() else None

    @contextmanager
    def noted(self, step: str) -> Iterator[None]:
        """Note that `step` failed when what is inside raises `TrainingError`. Raises `ConfigError` instead if
        the earlier start failed there too: the learner trains on the same groups again, so a third start
        helps only with other settings. Once the step succeeds, its failure is forgotten: a learner that is
        rolled back and fails there again may fail for another reason."""
        try:
            yield
        except TrainingError as error:
            if step == self._before:
                raise ConfigError(f"{step} failed again after a restart: {error}") from error
            write_json(self._file, {"step": step})
            raise
        if step == self._before:
            self._before = None
            self._file.unlink(missing_ok=True)  # every rank comes here
