"""`launch soak --compressed`: six weeks of steps in an hour, and what has grown meanwhile.

Restarts come first. Then every process goes on living, while prompts change and further actors come and go:
what grows is fitted there.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import structlog

from bus.codec import Json
from bus.errors import SluiceError
from bus.process.child_process import die_with_parent, module_command
from bus.server.nats_server import HTTP_HOST, free_port
from bus.waiting import set_within
from soak.growth.report import SIX_WEEKS_STEPS, Verdict, judge
from soak.growth.samples import Sample, last_step, sample_bus, sample_disk, sample_processes
from soak.growth.settings import (
    EACH_STEP,
    EVERY_VERSIONS,
    GROUPS,
    PROMPTS,
    RUN,
    SAMPLES,
    STREAM_BOUNDS,
    settings_of_run,
    write_prompts,
)
from soak.local_run import LocalRun
from soak.soak import wait_for_a_step
from storage.disk.run_directory import RunDirectory

log = structlog.get_logger()
PERIOD_S = 2.0
"""Time between two samples."""
RESTARTS_SHARE = 0.2
"""Part of the time in which processes are restarted; at least once each."""
LEARNER = "learner"
"""A learner that is asked to end ends the run: it is killed instead."""
PARTS = ("actors", "storage", LEARNER, "bus")
CHANGES = 40
"""Changes of the prompts over the calm part, and actors that come and go, if each takes its time at most."""
LEAST_PAUSE_S = 10.0
DATA_TIMEOUT_S = 300.0
GUEST_JOINS_S = 300.0
"""Longest time that a further actor may take to join."""
GUEST_STAYS_S = 2.0
END_S = 120.0
"""Longest time that a process may take to end, and its successor to be there."""


@dataclass
class CompressedRun:
    """A compressed run while it goes on."""

    local: LocalRun
    nats_port: int
    random: random.Random
    calm: bool = False
    samples: list[Sample] = field(default_factory=list)
    restarts: int = 0
    data_switches: int = 0
    guests: int = 0

    @property
    def directory(self) -> Path:
        """Directory that the run's directory lies in."""
        return self.local.run.path.parent


async def run_compressed(
    minutes: float, seed: int, directory: Path, stop: asyncio.Event
) -> tuple[dict[str, Json], list[Verdict]]:
    """Run for so many minutes, stop, and report the growth of every series; the samples lie beside the run.

    No process of the run survives this function. Raises `SluiceError`, once it is sampled in a group, when
    the run does not train, gives up, does not end, or refuses other prompts or another actor.
    """
    directory = await asyncio.to_thread(_made, directory)
    port = free_port(HTTP_HOST)
    config = directory / "settings.json"
    await asyncio.to_thread(config.write_text, json.dumps(settings_of_run(directory, port), indent=2))
    going = CompressedRun(
        LocalRun(RunDirectory(directory, RUN), ("--config", str(config))), port, random.Random(seed)
    )
    began = time.monotonic()
    try:
        await going.local.start()
        await wait_for_a_step(going.local)
        async with asyncio.TaskGroup() as tasks:  # a run that cannot be sampled is of no use
            sampling = tasks.create_task(_keep_sampling(going))
            await _go_through(going, began, minutes, stop)
            sampling.cancel()
        await going.local.end()
    finally:
        await going.local.kill()
    if not going.samples:
        raise SluiceError("the run was stopped before its first sample: there is nothing to judge")
    verdicts = await asyncio.to_thread(judge, going.samples, EACH_STEP, STREAM_BOUNDS)
    return _report(going, minutes, seed, verdicts), verdicts


def _made(directory: Path) -> Path:
    """Make a directory, and return its absolute path, which processes elsewhere find too."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory.resolve()


async def _go_through(going: CompressedRun, began: float, minutes: float, stop: asyncio.Event) -> None:
    restarts_s = RESTARTS_SHARE * 60 * minutes
    await _restart_parts(going, began + restarts_s, stop)
    going.calm = True
    calm_s = 60 * minutes - restarts_s  # all of it, also where restarts took longer than their part
    deadline = time.monotonic() + calm_s
    while not stop.is_set() and time.monotonic() < deadline:
        going.local.raise_if_ended()
        await _change_prompts(going)
        await _let_actor_come_and_go(going)
        pause_s = min(max(LEAST_PAUSE_S, calm_s / CHANGES), deadline - time.monotonic())
        await set_within(stop, max(0.0, pause_s))


async def _restart_parts(going: CompressedRun, until: float, stop: asyncio.Event) -> None:
    """Restart each part, in turn and again until it is time; then the supervisor, and with it all of them."""
    while not stop.is_set():
        for part in PARTS:
            if stop.is_set() or (going.restarts >= len(PARTS) and time.monotonic() > until):
                break
            await _restart(going, part)
        else:
            continue
        break
    if stop.is_set():
        return
    await going.local.end()
    await going.local.start()
    going.restarts += 1
    await wait_for_a_step(going.local)


async def _restart(going: CompressedRun, part: str) -> None:
    """End a part, kindly or not, and return when its successor lives and the run trains."""
    old = {process.pid for process in going.local.find(part)}
    kindly = part != LEARNER and going.random.random() < 0.5
    log.info("part_is_restarted", part=part, kindly=kindly)
    for process in going.local.find(part):
        with suppress(psutil.NoSuchProcess):
            process.terminate() if kindly else process.kill()
    going.restarts += 1
    async with asyncio.timeout(END_S):
        while not {process.pid for process in going.local.find(part)} - old:
            going.local.raise_if_ended()
            await asyncio.sleep(0.2)
    await wait_for_a_step(going.local)


async def _change_prompts(going: CompressedRun) -> None:
    """Give the run other prompts. Raises `SluiceError` when it does not take them."""
    path = going.directory / "other_prompts.jsonl"
    await asyncio.to_thread(write_prompts, path, PROMPTS, going.random)
    log_file = going.directory / "data.log"
    async with _started(going, log_file, "data", "--prompts", str(path)) as process:
        async with asyncio.timeout(DATA_TIMEOUT_S):
            await process.wait()
    if process.returncode != 0:
        raise SluiceError(f"`launch data` ended with status {process.returncode}: see {log_file}")
    going.data_switches += 1


async def _let_actor_come_and_go(going: CompressedRun) -> None:
    """Let a further actor join the run, and stop it. Raises `SluiceError` when it does not join."""
    log_file = going.directory / "guest.log"
    log_file.unlink(missing_ok=True)
    async with _started(going, log_file, "actors") as process:
        try:
            async with asyncio.timeout(GUEST_JOINS_S):
                while b"engine_ready" not in await asyncio.to_thread(log_file.read_bytes):
                    if process.returncode is not None:
                        raise SluiceError(f"an actor ended with status {process.returncode}: see {log_file}")
                    await asyncio.sleep(0.5)
        except TimeoutError:
            raise SluiceError(f"an actor did not join within {GUEST_JOINS_S:g} s: see {log_file}") from None
        await asyncio.sleep(GUEST_STAYS_S)
        process.terminate()
        async with asyncio.timeout(END_S):
            await process.wait()
    going.guests += 1


@asynccontextmanager
async def _started(
    going: CompressedRun, log_file: Path, command: str, *arguments: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a command for the run, which finds its bus in the run's directory; leaving ends it."""
    where = ("--run", RUN, "--directory", str(going.directory))
    with log_file.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *module_command("launch", command, *where, *arguments), stdin=asyncio.subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True, preexec_fn=die_with_parent(),
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _keep_sampling(going: CompressedRun) -> None:
    """Sample until cancelled, and write each sample to samples.jsonl."""
    began = time.monotonic()
    with (going.directory / "samples.jsonl").open("a") as file:
        while True:
            process = going.local.process
            if process is not None and process.returncode is None:
                calm = going.calm
                taken = await asyncio.to_thread(_sample, going, process.pid, time.monotonic() - began, calm)
                going.samples.append(taken)
                file.write(json.dumps(asdict(taken)) + "\n")
                file.flush()
            await asyncio.sleep(PERIOD_S)


def _sample(going: CompressedRun, supervisor: int, time_s: float, calm: bool) -> Sample:
    run = going.local.run
    step = max(last_step(run), going.samples[-1].step if going.samples else 0)  # a killed learner goes back
    lives, values = sample_processes(supervisor)
    return Sample(time_s, step, calm, lives, values | sample_disk(run.path) | sample_bus(going.nats_port))


def _report(going: CompressedRun, minutes: float, seed: int, verdicts: Sequence[Verdict]) -> dict[str, Json]:
    steps = last_step(going.local.run)
    fitted = [verdict.growth.steps for verdict in verdicts if verdict.growth is not None]
    return {
        "minutes": minutes,
        "seed": seed,
        "steps": steps,
        "steps_per_second": round(steps / max(1e-9, going.samples[-1].time_s), 2),
        "six_weeks_steps": SIX_WEEKS_STEPS,
        "longest_fit_steps": max(fitted, default=0.0),
        "trajectories": steps * GROUPS * SAMPLES,
        "evaluations": steps // EVERY_VERSIONS,
        "data_switches": going.data_switches,
        "guests": going.guests,
        "restarts": going.restarts,
        "samples": len(going.samples),
        "broken_statements": [verdict.series for verdict in verdicts if verdict.broken],
        "series": [verdict.to_json() for verdict in verdicts],
    }
