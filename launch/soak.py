"""`launch soak`: a real run whose processes are killed at random, and the account of everything after."""

import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import structlog
from numpy.typing import NDArray

from actors.rewards.base import Answer
from bus.codec import Json
from bus.errors import SluiceError
from learner import lineage
from storage.replay import ReplayStore
from storage.run import RunDirectory

log = structlog.get_logger()
RUN = "soak"
GROUPS, SAMPLES, MAX_STALENESS, SHARDS = 4, 4, 2, 2
LONGEST_ANSWER = 40
PARTS = ("actors", "storage", "learner", "bus")
START_TIMEOUT_S = 120.0
SETTLE_S = 15.0
"""After the last fault the run goes on undisturbed for so long; what has not come back then is lost."""
END_TIMEOUT_S = 180.0
SETTINGS = (
    "--run", RUN, "--data.task", "sort", "--reward", "launch.soak:longer",
    "--model.dtype", "float32", "--model.scratch.hidden-size", "32", "--model.scratch.layers", "1",
    "--model.scratch.heads", "2", "--model.scratch.kv-heads", "1", "--model.scratch.intermediate-size", "32",
    "--sampling.max-new-tokens", str(LONGEST_ANSWER), "--learner.steps", "1000000",
    "--learner.optimizer.lr", "1e-4", "--learner.checkpoint.save-every", "10",
    "--evaluation.every-versions", "0", "--replay.shards", str(SHARDS),
    "--admission.groups-per-step", str(GROUPS), "--admission.samples-per-prompt", str(SAMPLES),
    "--admission.max-staleness", str(MAX_STALENESS),
    "--supervision.restarts", "100000", "--supervision.longest-pause-s", "1",
)  # fmt: skip


def longer(answer: Answer) -> float:
    """The soak's reward: answers of every length occur, and there is something to learn."""
    return answer.token_count / LONGEST_ANSWER


@dataclass
class Soak:
    """A `launch local` under fire."""

    directory: Path
    random: random.Random
    faults: Counter[str] = field(default_factory=Counter)
    process: asyncio.subprocess.Process | None = None

    @property
    def kills(self) -> int:
        """Processes killed so far."""
        return sum(n for kind, n in self.faults.items() if kind.startswith("killed"))

    async def start(self) -> None:
        """Start the run, or start it again."""
        with (self.directory / "soak.log").open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "launch", "local", "--directory", str(self.directory), *SETTINGS,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    async def fault(self) -> None:
        """Do one harm, drawn at random."""
        harm = self.random.choices(
            ["kill part", "kill server", "kill supervisor", "suspend part", "damage bus"],
            weights=[60, 12, 8, 14, 6],
        )[0]
        if harm == "kill part":
            self._kill(self.random.choice(PARTS))
        elif harm == "kill server":
            self._kill("nats-server")
        elif harm == "kill supervisor":
            await self._kill_everything()
            await self.start()
        elif harm == "suspend part":
            await self._suspend(self.random.choice(PARTS[:3]))
        else:
            await self._damage_bus(self.random.choice(["truncated", "flipped", "wiped"]))

    async def end(self) -> None:
        """Stop kindly. Raises `SluiceError` when the run does not end, or not well."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                status = await self.process.wait()
        except TimeoutError:
            await self._kill_everything()
            raise SluiceError(
                f"the run did not end within {END_TIMEOUT_S:g} s: see {self.directory}"
            ) from None
        if status != 0:
            raise SluiceError(f"the run ended with status {status}: see {self.directory}/soak.log")

    def _kill(self, name: str) -> None:
        for process in self._find(name):
            with suppress(psutil.NoSuchProcess):
                process.kill()
                self.faults[f"killed {name}"] += 1

    async def _suspend(self, name: str) -> None:
        """Longer than roles and leases stay with a silent holder, now and then."""
        seconds = self.random.uniform(2, 9)
        for process in self._find(name):
            with suppress(psutil.NoSuchProcess):
                process.suspend()
                self.faults[f"suspended {name}"] += 1
                await asyncio.sleep(seconds)
                process.resume()

    async def _kill_everything(self) -> None:
        """The supervisor, as a power cut would, and whatever else is left of the run."""
        if self.process is None:
            return
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        await self.process.wait()
        self.faults["killed supervisor"] += 1
        await asyncio.to_thread(psutil.wait_procs, children, timeout=60)

    async def _damage_bus(self, how: str) -> None:
        """The faults with which Jepsen broke NATS 2.12.1: the directory truncated, a bit flipped, wiped."""
        await self._kill_everything()
        store = RunDirectory(self.directory, RUN).bus / "jetstream"
        blocks = sorted(path for path in store.rglob("*.blk") if path.stat().st_size > 0)
        if how == "wiped":
            shutil.rmtree(store, ignore_errors=True)
        elif blocks:
            _damage(self.random.choice(blocks), how, self.random)
        self.faults[f"bus directory {how}"] += 1
        await self.start()

    def _find(self, name: str) -> Iterator[psutil.Process]:
        """Running processes of one part."""
        if self.process is None or self.process.returncode is not None:
            return
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess, IndexError):
                    command = child.cmdline()
                    if name in (command[3], Path(command[0]).name):
                        yield child


async def run_soak(
    minutes: float, seed: int, directory: Path, stop: asyncio.Event, *, kills: int = 0
) -> dict[str, Json]:
    """Harm a run for so long and at least so many kills, let it settle, stop it, and account for everything.

    Raises `SluiceError` when the run does not start, gives up, or does not end.
    """
    run = RunDirectory(directory, RUN)
    await asyncio.to_thread(lambda: directory.mkdir(parents=True, exist_ok=True))
    soak = Soak(directory, random.Random(seed))
    await soak.start()
    await _training(run, soak)
    deadline = time.monotonic() + 60 * minutes
    try:
        while (time.monotonic() < deadline or soak.kills < kills) and not stop.is_set():
            await asyncio.sleep(soak.random.expovariate(1 / 5.0))
            await soak.fault()
            _refuse_end(soak)
        await asyncio.sleep(SETTLE_S)
    finally:
        await soak.end()
    return {"minutes": minutes, "seed": seed, "faults": dict(soak.faults), **account(run, soak.faults)}


def account(run: RunDirectory, faults: Counter[str]) -> dict[str, Json]:
    """Compare ledger, replay, checkpoint and lineage of a run that has ended."""
    progress = json.loads((run.path / "progress.json").read_text())
    groups = _ledger(run.ledger)
    lengths = _stored_lengths(run)
    trained = lineage.read(run.path / "lineage.jsonl", until_step=progress["step"])
    uses = Counter(lease for leases in trained.values() for lease in leases)
    overdue = progress["policy_version"] - MAX_STALENESS
    missing = [lease for lease, (state, _) in groups.items() if state in USED and lease not in lengths]
    stuck = [lease for lease, (state, version) in groups.items() if state == "issued" and version < overdue]
    given = {lease for lease, (state, _) in groups.items() if state in ("leased", "committed")}
    consumed = np.concatenate([lengths[lease] for lease in uses if lease in lengths])
    submitted = np.concatenate(list(lengths.values()))
    return {
        "kills": sum(n for kind, n in faults.items() if kind.startswith("killed")),
        "steps": progress["step"],
        "groups_issued": len(groups),
        "trajectories_trained": progress["trajectories_trained"],
        "lost": (len(missing) + len(stuck)) * SAMPLES,
        "trained_too_often": sum(n - 1 for n in uses.values() if n > 1) * SAMPLES,
        "trained_but_not_in_ledger": len(set(uses) - given),
        "given_but_not_trained": len(given - set(uses)),
        "length_ks_p": ks_p(consumed, submitted),
        "max_staleness_seen": progress["max_staleness_seen"],
        "max_staleness_allowed": MAX_STALENESS,
    }


USED = ("stored", "leased", "committed")


def ks_p(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """Two-sample Kolmogorov-Smirnov p-value, asymptotic (Stephens 1970): are the samples alike?"""
    values = np.union1d(one, other)
    cdf_one = np.searchsorted(np.sort(one), values, side="right") / len(one)
    cdf_other = np.searchsorted(np.sort(other), values, side="right") / len(other)
    root = np.sqrt(len(one) * len(other) / (len(one) + len(other)))
    statistic = (root + 0.12 + 0.11 / root) * float(np.abs(cdf_one - cdf_other).max())
    if statistic < 0.2:  # the series converges too slowly there; p is 1 to six digits
        return 1.0
    terms = [(-1) ** (k - 1) * np.exp(-2 * (k * statistic) ** 2) for k in range(1, 101)]
    return float(np.clip(2 * np.sum(terms), 0, 1))


def _ledger(path: Path) -> dict[int, tuple[str, int]]:
    """Lease -> (state, version at issue)."""
    with closing(sqlite3.connect(path)) as ledger:
        rows = ledger.execute("SELECT lease_id, state, policy_version FROM leases")
        return {lease: (state, version) for lease, state, version in rows}


def _stored_lengths(run: RunDirectory) -> dict[int, NDArray[np.int64]]:
    """Lease -> lengths of its trajectories, of every complete group in replay."""
    lengths: dict[int, NDArray[np.int64]] = {}
    for shard in range(SHARDS):
        with closing(ReplayStore.open(run.replay(shard))) as store:
            for lease in store.completed:
                lengths[lease] = np.array([len(t.token_ids) for t in store.read([lease])])
    return lengths


async def _training(run: RunDirectory, soak: Soak) -> None:
    """Return when the run trains, so that every fault hits something."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (run.path / "lineage.jsonl").exists():
        _refuse_end(soak)
        if time.monotonic() > deadline:
            raise SluiceError(f"no training step within {START_TIMEOUT_S:g} s: see {soak.directory}/soak.log")
        await asyncio.sleep(0.2)


def _refuse_end(soak: Soak) -> None:
    if soak.process is not None and soak.process.returncode is not None:
        raise SluiceError(
            f"the run gave up with status {soak.process.returncode} after {dict(soak.faults)}: "
            f"see {soak.directory}/soak.log"
        )


def _damage(path: Path, how: str, draw: random.Random) -> None:
    size = path.stat().st_size
    if how == "truncated":
        os.truncate(path, draw.randrange(size))
        return
    with path.open("r+b") as file:
        position = draw.randrange(size)
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << draw.randrange(8))]))


def exit_status(result: dict[str, Json]) -> int:
    """0 when nothing was lost, nothing trained on twice and the bound held."""
    clean = all(result[key] == 0 for key in ("lost", "trained_too_often", "trained_but_not_in_ledger"))
    fair = float(str(result["length_ks_p"])) > 0.01
    bounded = int(str(result["max_staleness_seen"])) <= int(str(result["max_staleness_allowed"]))
    return 0 if clean and fair and bounded else 1
