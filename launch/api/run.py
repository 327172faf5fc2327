"""A run of this host, as `launch.start` and `launch.attach` return it."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import structlog

from bus.codec import Json
from bus.errors import ConfigError, SluiceError
from bus.trajectory import Trajectory
from launch.api.child import LocalProcess
from launch.dashboard.metrics_source import MetricsFile
from launch.model_files.model_directory import model_of_run
from launch.operations.run_stop import stop_run
from launch.process.log_settings import configure_logging
from launch.run_view.history import Evaluation, Step, evaluation_of, is_evaluation, is_step, step_of
from launch.run_view.recorded_runs import RecordedRun, recorded_runs
from launch.run_view.run_files import finite, recorded_config
from launch.trajectories.held_out import named_answers
from launch.trajectories.search import told_left_out
from launch.trajectories.stored_groups import stored_groups
from launch.trajectories.token_texts import Decode, decoder
from storage.disk.atomic_files import read_json
from storage.disk.run_directory import RunDirectory
from storage.metrics.held_out_answers import HeldOutStore
from storage.metrics.records import Record, integer, number

log = structlog.get_logger()


@dataclass(frozen=True)
class Result:
    """What a run is judged by once it has ended; None stands for what was not measured."""

    run: str
    stage: str
    """`done` when the learner ended by itself; `starting`, `warmup` or `rl` of a run that was stopped."""
    steps: int
    """Optimizer steps of reinforcement learning."""
    policy_version: int
    accuracy_start: float | None
    """Held-out reward of the untrained policy, sampled."""
    accuracy_end: float | None
    """Held-out reward of the last version, sampled."""
    wall_s: float
    """Seconds of the latest launch."""
    trajectories_trained: int
    max_staleness_seen: int
    """Worst staleness of a trained trajectory, in policy versions."""
    export: Path | None
    """Directory of the trained model, which transformers loads."""
    checkpoint: Path | None
    """The newest checkpoint."""
    summary: Mapping[str, Json]
    """All of summary.json."""


def result_of(summary: Mapping[str, Json]) -> Result:
    """Return the result that a run's summary tells."""
    return Result(
        run=str(summary["run"]),
        stage=str(summary["stage"]),
        steps=integer(summary, "steps"),
        policy_version=integer(summary, "policy_version"),
        accuracy_start=finite(number(summary, "heldout_accuracy_start")),
        accuracy_end=finite(number(summary, "heldout_accuracy_end")),
        wall_s=number(summary, "wall_s"),
        trajectories_trained=integer(summary, "trajectories_trained"),
        max_staleness_seen=integer(summary, "max_staleness_seen"),
        export=_path(summary, "export"),
        checkpoint=_path(summary, "checkpoint"),
        summary=summary,
    )


def _path(summary: Mapping[str, Json], key: str) -> Path | None:
    value = summary.get(key)
    return Path(value) if isinstance(value, str) else None


T = TypeVar("T")
POLL_S = 0.5
"""Time between two looks for new values."""


class Stream(Generic[T]):
    """Values in their order, from the first one on: those that are there, then those that come.

    It ends with the run. Each `for` and each `async for` over it begins anew."""

    def __init__(
        self, begin: Callable[[], Callable[[], Sequence[T]]], running: Callable[[], bool],
        raise_failure: Callable[[], None],
    ) -> None:  # fmt: skip
        """`begin` makes what takes the next values, and `running` says whether more may follow.

        `raise_failure` is called after the last value; it raises the error that ended the run, if one did."""
        self._begin = begin
        self._running = running
        self._raise_failure = raise_failure

    def __iter__(self) -> Iterator[T]:
        """Wait in this thread for what is not there yet."""
        take, over = self._begin(), False
        while not over:
            over, found = self._look(take)
            yield from found
            if not (over or found):
                time.sleep(POLL_S)

    async def __aiter__(self) -> AsyncIterator[T]:
        """Wait without holding up the event loop."""
        take, over = self._begin(), False
        while not over:
            over, found = await asyncio.to_thread(self._look, take)
            for value in found:
                yield value
            if not (over or found):
                await asyncio.sleep(POLL_S)

    def _look(self, take: Callable[[], Sequence[T]]) -> tuple[bool, Sequence[T]]:
        """Return whether the run is over, and the next values. Raises its failure after the last."""
        ended = not self._running()  # first: what came last is taken
        try:
            found = take()
        except SluiceError:
            if ended:
                self._raise_failure()  # the failure says why files are missing
            raise
        over = ended and not found
        if over:
            self._raise_failure()
        return over, found


STOP_TIMEOUT_S = 180.0
"""A learner may take two minutes to finish its step and save a checkpoint."""
AT_ONCE = 64
"""Most groups whose trajectories are taken at a time."""


class Run:
    """A run that goes on, or has ended, with its directory on this host."""

    def __init__(self, directory: RunDirectory, process: LocalProcess | None = None) -> None:
        """Make a run by `launch.start` or `launch.attach`; `process` is the one that this program started."""
        self._directory = directory
        self._process = process
        self._decode: Decode | None = None
        if not structlog.is_configured():  # unconfigured structlog prints among what the program prints
            configure_logging("warning")

    def __repr__(self) -> str:
        return f"<Run {self.name!r}, {self.status().state}, in {self.path}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def name(self) -> str:
        """Return the run's name."""
        return self._directory.name

    @property
    def path(self) -> Path:
        """Return the run's directory, with `curves.png`, `metrics.jsonl`, `logs/` and `export/`."""
        return self._directory.path

    @property
    def running(self) -> bool:
        """Return whether processes of the run go on, on this host."""
        return self._process.runs if self._process is not None else bool(self.status().pids)

    def status(self) -> RecordedRun:
        """Return how far the run is: its state, stage, step, latest reward and accuracy."""
        [found] = recorded_runs([self.path])
        return found

    # --- what the run does, as it does it ---

    def metrics(self) -> Stream[Record]:
        """Return every row of metrics.jsonl by name, such as `reward/mean`: steps of all kinds, evaluations.

        A step that is trained again after a crash has another row. Raises what `wait` does at the end."""
        return Stream(lambda: new_rows(self._directory), *self._end)

    def steps(self) -> Stream[Step]:
        """Return the optimizer steps of reinforcement learning, as `metrics` does."""
        return Stream(lambda: new_values(self._directory, is_step, step_of), *self._end)

    def evaluations(self) -> Stream[Evaluation]:
        """Return the evaluations of the held-out prompts, as `metrics` does, without further data sets."""

        def is_wanted(row: Record) -> bool:
            return is_evaluation(row) and row.get("data_set") is None

        return Stream(lambda: new_values(self._directory, is_wanted, evaluation_of), *self._end)

    def trajectories(self, *, held_out: bool = False) -> Stream[Trajectory]:
        """Return the trajectories of groups in store, a group's together, then of each group that completes.

        Those that were retired before they were read, or are damaged, are left out, and a warning says how
        many and why. `decode` gives their text. With `held_out`
        these are the answers to held-out prompts that `evaluation.kept_answers` keeps, which nothing trains
        on: their names begin with h, and `metadata["data_set"]` names their data set. Raises `ConfigError`
        where the run's shards are on other hosts, and what `wait` does at the end."""
        if held_out:
            return Stream(lambda: NewHeldOutAnswers(self._directory), *self._end)
        return Stream(lambda: NewTrajectories(self._directory, lambda: self.running), *self._end)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, by the run's own tokenizer, with special tokens."""
        if self._decode is None:
            self._decode = decoder(model_of_run(recorded_config(self._directory), self._directory))
        return self._decode(token_ids)

    # --- the end of a run ---

    def wait(self, timeout_s: float | None = None) -> Result:
        """Wait until the run has ended, and return its result.

        Raises `TimeoutError` if that takes longer, and the error that ended the run: `ConfigError` for
        settings or files that cannot work, `LostDataError` for damaged files, `BusAwayError` for a bus that
        is away, and `SluiceError` with the last lines of its log for another failure."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.running:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.name!r} goes on after {timeout_s:g} s")
            time.sleep(POLL_S)
        self._raise_failure()
        return self.result()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the run in order, and wait for it: the learner finishes its step and saves a checkpoint.

        Nothing happens if it has ended. Raises `ConfigError` for one that `launch local` did not start, and
        `SluiceError` when it has not ended in time."""
        if self.running:
            stop_run(self.path, timeout_s)

    def result(self) -> Result:
        """Return what came out of the run. Raises `SluiceError` before its end, and if it recorded none."""
        if self.running:
            raise SluiceError(f"run {self.name!r} goes on: its result is there when it has ended, see wait()")
        path = self.path / "summary.json"
        if not path.exists():
            raise SluiceError(f"{path} is missing: the run trained nothing, {self.path / 'logs'} says why")
        return result_of(read_json(path, "start the run again to have it written"))

    # --- reading ---

    @property
    def _end(self) -> tuple[Callable[[], bool], Callable[[], None]]:
        """Return what tells a stream whether more may come, and with which error the run ended."""
        return lambda: self.running, self._raise_failure

    def _raise_failure(self) -> None:
        if self._process is not None and (failure := self._process.failure()) is not None:
            raise failure


def new_rows(run: RunDirectory) -> Callable[[], Sequence[Record]]:
    """Return what takes the next rows of metrics.jsonl, from the first one on."""
    file = MetricsFile(run.metrics)
    return lambda: file.take() if file.exists else ()


def new_values(
    run: RunDirectory, wanted: Callable[[Record], bool], made: Callable[[Record], T]
) -> Callable[[], Sequence[T]]:
    """Return what takes the next rows that are wanted, made into values."""
    rows = new_rows(run)

    def take() -> Sequence[T]:
        while found := rows():  # an empty answer would say that there are no more rows
            if values := [made(row) for row in found if wanted(row)]:
                return values
        return ()

    return take


@dataclass
class NewTrajectories:
    """Takes trajectories in the order of their leases, as far as their groups are complete."""

    run: RunDirectory
    running: Callable[[], bool]
    """Says whether processes of the run go on, which may still make its stores."""
    taken: set[int] = field(default_factory=set)
    """Leases of the groups that were taken."""
    waiting: deque[int] = field(default_factory=deque)
    """Leases of complete groups that are taken next."""
    left_out: dict[int, str] = field(default_factory=dict)
    """Why groups could not be read, by lease, until that was told."""

    def __call__(self) -> Sequence[Trajectory]:
        """Return the trajectories of up to `AT_ONCE` groups. Raises `ConfigError` where no stores are."""
        if not self.run.config.exists() and self.running():
            return ()
        try:
            with stored_groups(self.run) as groups:
                if not self.waiting:
                    self.waiting.extend(lease for lease in groups.complete() if lease not in self.taken)
                while self.waiting:  # an empty answer would say that nothing is left
                    leases = list(islice(self.waiting, AT_ONCE))
                    found = [trajectory for group in groups.read(leases) for trajectory in group]
                    self.taken.update(self.waiting.popleft() for _ in leases)
                    self.left_out.update(groups.left_out)
                    if found:
                        return found
            if self.left_out:
                log.warning("trajectories_incomplete", reason=told_left_out(self.left_out))
                self.left_out.clear()
        except ConfigError:
            if not self.running():  # else storage makes the files
                raise
        return ()


@dataclass
class NewHeldOutAnswers:
    """Takes the answers to held-out prompts that storage keeps, in the order in which they came."""

    run: RunDirectory
    last: int = -1
    """Number of the newest group that was taken."""

    def __call__(self) -> Sequence[Trajectory]:
        """Return the answers to up to `AT_ONCE` prompts."""
        store = HeldOutStore(self.run.held_out_answers)
        while waiting := [number for number in store.numbers() if number > self.last][:AT_ONCE]:
            found = store.read(waiting)
            self.last = waiting[-1]
            if found:  # groups that storage has removed meanwhile say nothing of the rest
                return [t for number, one in found.items() for t in named_answers(number, one)]
        return ()
