"""Log-probs of a few trained trajectories under the learner's weights: a file a recorded step, for people.

It loads without torch, since the dashboard reads them."""

import io
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from storage.disk.atomic_files import make_directory, write_file

log = structlog.get_logger()
_DIRECTORY = "logprobs"
STEPS_KEPT = 64
"""Records that are kept, the newest ones."""
_NAME = re.compile(r"step-([0-9]{8,})\.npz")
_DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


@dataclass(frozen=True, slots=True)
class TrainedLogprobs:
    """What a step's weights made of a trajectory before they were trained on it."""

    step: int
    policy_version: int
    """Version of the weights, which the step had yet to change."""
    logprobs: NDArray[np.float32]
    """[N] nats, of the trained tokens in their order."""


def write(run: Path, step: int, policy_version: int, logprobs: Mapping[str, NDArray[np.float32]]) -> None:
    """Record log-probs by trajectory in the directory of a run; without any it does nothing.

    Records of later steps, which a resumed learner has undone, and the oldest ones beyond `STEPS_KEPT` are
    removed."""
    if not logprobs:
        return
    directory = run / _DIRECTORY
    make_directory(directory)
    content = io.BytesIO()
    np.savez(
        content,
        policy_version=np.int64(policy_version),
        names=np.array([*logprobs], np.str_),
        lengths=np.array([len(values) for values in logprobs.values()], np.int64),
        logprobs=np.concatenate([np.empty(0, np.float32), *logprobs.values()]),
    )
    write_file(directory / f"step-{step:08}.npz", content.getvalue())
    steps = _files(run)
    for old, path in steps.items():
        if old > step or old in sorted(steps)[:-STEPS_KEPT]:
            path.unlink(missing_ok=True)


def read(run: Path, steps: Collection[int]) -> dict[str, TrainedLogprobs]:
    """Return the trajectories that have a record of one of these steps, each with the newest."""
    found: dict[str, TrainedLogprobs] = {}
    for record in _records(run, steps):
        found = record | found
    return found


def trajectories(run: Path) -> set[str]:
    """Return the names of all trajectories that have a record."""
    return {name for record in _records(run) for name in record}


def _records(run: Path, steps: Collection[int] | None = None) -> Iterator[dict[str, TrainedLogprobs]]:
    """Yield the records of these steps, or of all, by trajectory, the newest step first; one that cannot be
    read is left out."""
    for step, path in sorted(_files(run).items(), reverse=True):
        if steps is not None and step not in steps:
            continue
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
                version, names = int(arrays["policy_version"]), arrays["names"].tolist()
                each = np.split(arrays["logprobs"], np.cumsum(arrays["lengths"])[:-1])
                record = {
                    name: TrainedLogprobs(step, version, logprobs)
                    for name, logprobs in zip(names, each, strict=True)
                }
        except FileNotFoundError:  # the oldest file was removed now
            continue
        except _DAMAGE as error:
            log.warning("logprobs_unreadable", path=str(path), reason=repr(error))
            continue
        yield record


def _files(run: Path) -> dict[int, Path]:
    directory = run / _DIRECTORY
    if not directory.is_dir():
        return {}
    named = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return {int(found[1]): path for found, path in named if found is not None}
