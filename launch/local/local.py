"""`launch local`: runs a whole run on this machine, supervises its processes and shows its progress."""

import asyncio
import os
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import psutil
import structlog
from rich.console import Console

from bus.config import URL_VARIABLE
from bus.connection.bus import Bus
from bus.connection.status import peak_rss_bytes
from bus.errors import SchemaError
from bus.messages import RunRecord
from bus.process.child_process import module_command
from bus.server.nats_server import free_port, listens
from bus.waiting import set_within
from launch.checks.resumption import finished, remarks, stage_of
from launch.checks.start_checks import check_start, start_remarks
from launch.local.supervisor import Part, Supervisor
from launch.process.ranks import SMALLER_LEARNER
from launch.process.run_ending import noted_ending
from launch.run_view.alert_calls import AlertCalls
from launch.run_view.monitor import RunMonitor, RunSettings, watch
from launch.run_view.run_files import RunFiles, changed_settings
from launch.run_view.run_lock import only_process
from launch.run_view.served_page import page_of
from launch.run_view.source_run import refuse_other_origin
from launch.screens.conclusion import conclude
from launch.screens.summary import Summary, print_summary
from launch.screens.terminal_view import TerminalView
from launch.settings.run_config import RunConfig, policy_config
from storage.disk.atomic_files import read_json
from storage.disk.file_errors import lack_of_room
from storage.disk.run_directory import RunDirectory

log = structlog.get_logger()
HOST = "127.0.0.1"
LOOK_S = 1.0
MONITORED = ("bus", "storage", "actors", "learner")
"""Parts in the order of their ports for probes; learners of further policies follow."""
STOPPING = "Stopping: each process saves or hands back what it began. A second Ctrl-C kills all at once."
WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Has torch's threads sleep while they wait for each other. They would spin on the cores that the threads of
the learner, or of the embedded engine, need to come to where they are waited for."""
LEARNER_DRAIN_S = 120.0
"""Longest time that a learner may take to finish its step and save a checkpoint."""
HAND_BACK_S = 45.0
"""Longest time that actors may take to store what they do not finish, and to close their engines."""


async def run_local(config: RunConfig, stop: asyncio.Event, *, own_bus: bool) -> int:
    """Run everything until the learner is done or `stop`; returns the exit status."""
    console = Console()
    run = RunDirectory(config.directory, config.run)
    if (complete := finished(config, run)) is not None:
        print_summary(console, read_json(run.summary, "remove it to have the run go on"))
        console.print(complete, soft_wrap=True, markup=False)
        return 0
    run.refuse_unwritable()
    run.refuse_other_format()
    refuse_other_origin(config, run)
    calls = AlertCalls(config)
    checked = await check_start(config, run, own_bus=own_bus)
    for remark in [*start_remarks(config, checked.of_models), *(remarks(config, run) if run.exists else ())]:
        console.print(remark, soft_wrap=True, markup=False)
    console.print(dashboard_hint(config), soft_wrap=True)
    patience_s = max(LEARNER_DRAIN_S, _actors_drain_s(config))
    # The parts inherit the lock, so it is free when all of them have ended, however this process did.
    async with only_process(run.path / "lock", patience_s=patience_s) as lock, calls.failure_told(run):
        with noted_ending(run, stop):
            summary = await _supervise(config, run, console, stop, own_bus=own_bus, lock=lock)
    print_summary(console, summary)
    console.print(dashboard_hint(config), soft_wrap=True)
    if stop.is_set():
        console.print("Stopped. The same command takes the run up again.")
    return 0


def dashboard_hint(config: RunConfig) -> str:
    """Return the line that tells how to look at the run in a browser, or where it is shown already."""
    if (page := page_of(config.directory, config.run)) is not None:
        return f"The run in a browser: {page}"
    where = ["--run", config.run]
    if config.directory != RunConfig.model_fields["directory"].default:
        where += ["--directory", str(config.directory)]
    return f"To look at the run in a browser: launch dashboard {shlex.join(where)}"


async def _supervise(
    config: RunConfig, run: RunDirectory, console: Console, stop: asyncio.Event, *, own_bus: bool, lock: int
) -> Summary:
    if own_bus:
        bus = config.bus.model_copy(update={"url": f"nats://{HOST}:{free_port(HOST)}"})
        config = config.model_copy(update={"bus": bus})
    changed = changed_settings(RunFiles(run.path, lenient=True).settings, config)
    settings = config.model_dump_json(indent=2)
    run.asked_config.write_text(settings)
    if own_bus or not run.config.exists():  # nobody else's storage or actor can refuse them
        run.config.write_text(settings)
    run.write_provenance(changed)
    started = time.monotonic()
    monitor = RunMonitor(RunSettings.of_run(config))
    supervisor = Supervisor(run.logs, policy=config.supervision, inherited=[lock])
    async with _parts(config, run, supervisor, monitor, console, stop, own_bus=own_bus):
        await supervisor.watch(stop)
        if stop.is_set():
            await asyncio.to_thread(console.print, STOPPING, soft_wrap=True)
    return conclude(config, run, monitor, time.monotonic() - started)


@asynccontextmanager
async def _parts(
    config: RunConfig, run: RunDirectory, supervisor: Supervisor, monitor: RunMonitor, console: Console,
    stop: asyncio.Event, *, own_bus: bool,
) -> AsyncIterator[None]:  # fmt: skip
    """Run every process of the run, and the screen; leaving stops them, the bus last."""
    try:
        if own_bus:
            port = int(config.bus.url.rpartition(":")[2])
            await supervisor.start(
                _with_variables(config, _bus_part(config, run, port)),
                ready=partial(_bus_listens, supervisor, port),
            )
        async with AsyncExitStack() as opened:
            each = (config, *(policy_config(config, name) for name in config.policies))
            runs = [
                await opened.enter_async_context(Bus.connect(one.bus, one.run, name="supervisor"))
                for one in each
            ]
            announced = await _announced_anew(runs, stop, own_bus=own_bus)
            bus, gone = runs[0], asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                screens = [
                    tasks.create_task(watch(bus, monitor, gone, run=run)),
                    tasks.create_task(TerminalView(monitor, console).run(gone)),
                    tasks.create_task(_watch_host(supervisor, monitor, run, gone)),
                    tasks.create_task(AlertCalls(config).watch(monitor, gone)),
                    *(
                        tasks.create_task(AlertCalls(policy).watch_learner(of_policy, gone))
                        for policy, of_policy in zip(each[1:], runs[1:], strict=True)
                    ),
                ]
                try:
                    storage, *others = _run_parts(config, run)
                    await supervisor.start(storage, ready=announced)
                    for part in others:
                        await supervisor.start(part)
                    yield
                finally:
                    await supervisor.end(except_part="bus")
                    gone.set()
                    await asyncio.wait(screens)  # a failure must not cut off their last words
    finally:
        await supervisor.end()


async def _announced_anew(
    runs: Sequence[Bus], stop: asyncio.Event, *, own_bus: bool
) -> Callable[[], Awaitable[bool]] | None:
    """Keep parts from joining by what an earlier launch has announced of the run and of its further policies.

    On a bus of the launch's own it is removed: all parts wait until storage announces the runs. On another
    bus it may be that of a run of this name which goes on, and by which storage is refused. Return what tells
    whether storage has announced all that was there before, or `stop` came; None where nothing was."""
    if own_bus:
        for bus in runs:
            await bus.create_keys()
            await bus.delete("run")
        return None
    earlier = [(bus, revision) for bus in runs if (revision := await _definition(bus))]

    async def is_announced() -> bool:
        return stop.is_set() or all([await _definition(bus) not in (0, before) for bus, before in earlier])

    return is_announced if earlier else None


async def _definition(bus: Bus) -> int:
    """Return the revision of the run's definition on its bus; 0 where there is none of this build."""
    try:
        found = await bus.get("run", RunRecord)
    except SchemaError:
        return 0
    return 0 if found is None else found[1]


def _bus_part(config: RunConfig, run: RunDirectory, port: int) -> Part:
    where = ("--host", HOST, "--port", str(port), "--directory", str(run.bus))
    numbers = config.monitoring.nats_port
    own = [] if numbers is None else ["--monitoring.nats-port", str(numbers)]
    return Part("bus", _command("bus", *where, *_monitoring(config, "bus"), *own), serves=True)


def _monitoring(config: RunConfig, part: str) -> list[str]:
    """Return the flags that give a part its own port for probes: those of one host must not collide."""
    first, host = config.monitoring.port, config.monitoring.host
    if first is None:
        return []
    names = (*MONITORED, *(name for name in config.parts if name not in MONITORED))
    port = first + names.index(part) if first else 0
    stuck = f"{config.monitoring.stuck_after_s:g}"
    return ["--monitoring.port", str(port), "--monitoring.host", host, "--monitoring.stuck-after-s", stuck]


def _run_parts(config: RunConfig, run: RunDirectory) -> tuple[Part, ...]:
    """Return the parts, started by the same commands that separate hosts would use."""
    join = ["--run", config.run, "--directory", str(config.directory)]
    if config.bus.creds is not None:
        join += ["--creds", str(config.bus.creds)]
    allow = config.allow
    for directory in allow.plugins_from:
        join += ["--allow.plugins-from", str(directory)]
    if allow.insecure:
        join.append("--allow.insecure")
    python = [] if allow.engine_python is None else ["--allow.engine-python", str(allow.engine_python)]
    defines = [*join[:4], "--config", str(run.asked_config), "--no-summary"]
    storage = Part("storage", _command("storage", *defines, *_monitoring(config, "storage")), serves=True)
    actors = Part(
        "actors",
        _command("actors", *join, *python, *_monitoring(config, "actors")),
        drain_s=_actors_drain_s(config),
        may_end=lambda: stage_of(run) == "done",  # actors may be sooner than the learner, which says so
        smaller="lower actors.engine.slots",
    )
    learner = replace(_learner_part(config, "learner", join), ends_run=True)
    further = [_learner_part(config, f"learner-{one}", [*join, "--policy", one]) for one in config.policies]
    parts = (storage, *([actors] if config.has_rollouts else []), learner, *further)
    return tuple(_with_variables(config, part) for part in parts)


def _actors_drain_s(config: RunConfig) -> float:
    return config.actors.interruption.finish_within_s + HAND_BACK_S


def _learner_part(config: RunConfig, name: str, flags: list[str]) -> Part:
    """Return a learner. That of a further policy may be done while the run goes on, and ends with the run."""
    command = _command("learner", *flags, *_monitoring(config, name))
    return Part(name, command, may_end=lambda: True, drain_s=LEARNER_DRAIN_S, smaller=SMALLER_LEARNER)


def _with_variables(config: RunConfig, part: Part) -> Part:
    """Add the variables of the part. The bus's URL is one, since it may hold a password, and arguments can be
    read by everybody on the host."""
    own = config.supervision.environment.get(part.name, {})
    shares_cores = config.actors.engine.in_process and not WAITING.keys() & os.environ.keys()
    waiting = WAITING if shares_cores else {}
    return replace(part, environment={URL_VARIABLE: config.bus.url, **waiting, **own})


def _command(*arguments: str) -> tuple[str, ...]:
    return module_command("launch", *arguments)


async def _bus_listens(supervisor: Supervisor, port: int) -> bool:
    """Return whether the bus's own nats-server accepts connections: another may have taken the port."""
    try:
        pids = supervisor.pids("bus")
        servers = [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return False
    return any(listens(server.pid, port) for server in servers)


async def _watch_host(
    supervisor: Supervisor, monitor: RunMonitor, run: RunDirectory, stop: asyncio.Event
) -> None:
    """Look whether the run's disk is full and which parts have ended, and count the memory of processes that
    send no status: the server, the one that runs it, and this one."""
    while not stop.is_set():
        monitor.full_disk = await asyncio.to_thread(lack_of_room, run.path)
        monitor.endings = supervisor.endings
        monitor.note_memory("supervisor", peak_rss_bytes())
        for pid in supervisor.pids("bus"):
            try:
                monitor.note_memory("bus", peak_rss_bytes(pid))
                for child in psutil.Process(pid).children():
                    monitor.note_memory("nats-server", peak_rss_bytes(child.pid))
            except psutil.NoSuchProcess:
                continue
        await set_within(stop, LOOK_S)
