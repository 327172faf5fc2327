"""`launch bus`: a nats-server that is started again when it cannot store any more."""

import asyncio
import platform
import time
from pathlib import Path
from secrets import token_hex

import structlog

from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.connection.process_state import ProcessState
from bus.errors import BusError, ConfigError, SluiceError
from bus.security.credentials import Credentials, load_credentials
from bus.server.nats_server import HTTP_HOST, NatsServer, free_port, is_loopback
from bus.server.secure_directory import SecureDirectory
from bus.waiting import cancelled, set_within
from launch.process.health_server import monitored
from launch.services.write_check import until_a_stream_breaks, until_it_cannot_store
from launch.settings.run_config import MonitoringConfig
from storage.disk.atomic_files import make_directory, try_lock
from storage.disk.file_errors import lack_of_room

log = structlog.get_logger()
PORTS = range(1 << 16)
PERIOD_S = 1.0
"""Time between two looks at the disk."""
LOOK_S = 0.5
TELL_AGAIN_S = 10.0
"""Seconds until a run is told again that could not be told of its keys."""
CONNECT_S = 5.0
"""Longest wait for the server, as an operator of a run."""


async def serve_bus(
    host: str, port: int, directory: Path, stop: asyncio.Event, *, insecure: bool = False,
    secure: Path | None = None, runs: tuple[str, ...] = (), monitoring: MonitoringConfig | None = None,
) -> None:  # fmt: skip
    """Run a nats-server until `stop`; it lets in only who has credentials from the directory `secure`. Raises
    `ConfigError` for a host beyond loopback that everybody could use, unless `insecure` allows it."""
    if not (is_loopback(host) or insecure or secure is not None):
        raise ConfigError(
            f"--host {host} would let everybody on the network run programs on the run's hosts, since no "
            "credentials are asked for: give --secure DIR, listen at 127.0.0.1, "
            "or give --insecure on a network of your own"
        )
    if port not in PORTS:
        raise ConfigError(
            f"--port {port} is no port: choose one from 1 to {PORTS[-1]}, or 0 for any that is free"
        )
    state = ProcessState("bus")
    state.wait_for("nats-server to listen")
    make_directory(directory)
    with (directory / "lock").open("a") as lock:
        if not try_lock(lock):
            raise ConfigError(f"another `launch bus` keeps its streams in {directory}: give --directory")
        keys = SecureDirectory(secure) if secure is not None else None
        monitoring = monitoring or MonitoringConfig()
        told = monitoring.nats_port
        server = NatsServer(
            directory, host=host, port=port, secure=keys,
            http_port=told or free_port(HTTP_HOST), http_path="" if told else f"/{token_hex(16)}",
        )  # fmt: skip
        if keys is not None:
            reached_at = platform.node() if host in ("0.0.0.0", "::") else host
            keys.make(runs, f"nats://{reached_at}:{server.port}")
        async with monitored(monitoring, state), server:
            log.info("bus_ready", url=server.url, runs=keys.runs if keys is not None else "all")
            if keys is None:
                await _keep_alive(server, state, stop, None)
                return
            following = asyncio.create_task(follow_directory(server, keys, stop), name="follow keys")
            try:
                await _keep_alive(server, state, stop, load_credentials(keys.probe))
            finally:
                await cancelled(following)


async def _keep_alive(
    server: NatsServer, state: ProcessState, stop: asyncio.Event, probe: Credentials | None
) -> None:
    restarts = 0
    while True:
        state.waits_for, state.doing = "", f"nats-server listens at {server.url}"
        state.values = {"restarts": restarts}
        if await _ended_or_stopped(server, stop, probe):
            return
        state.wait_for("nats-server to start again, since it could not store: is the disk full?")
        if not await _has_room(server.directory, state, stop):
            return
        restarts += 1
        await server.stop()
        await server.start()


async def _ended_or_stopped(server: NatsServer, stop: asyncio.Event, probe: Credentials | None) -> bool:
    """Wait for `stop`; return False when the server has to be restarted before."""
    ended = asyncio.create_task(server.wait())
    stopping = asyncio.create_task(stop.wait())
    refusing = asyncio.create_task(until_it_cannot_store(server.url, probe))
    # a full disk, or a write that failed once, may break some streams and not that of the probe
    broken = asyncio.create_task(until_a_stream_breaks(server.http_url))
    full = asyncio.create_task(_until_full(server.directory))
    tasks = {ended, stopping, refusing, broken, full}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await cancelled(*tasks)
    if stop.is_set():
        return True
    if not ended.cancelled():
        raise BusError(
            f"nats-server ended by itself with status {ended.result()}: see {server.directory}/nats.log"
        )
    reason = next(task.result() for task in (full, broken, refusing) if not task.cancelled())
    log.error("bus_cannot_store", reason=reason, remedy="is the disk full? nats-server starts again")
    return False


async def _until_full(directory: Path) -> str:
    while not (full := lack_of_room(directory)):  # noqa: ASYNC110 - of a disk nobody sets an event
        await asyncio.sleep(PERIOD_S)
    return full


async def _has_room(directory: Path, state: ProcessState, stop: asyncio.Event) -> bool:
    """Wait until the disk of a directory has room; return False when `stop` came first. Until then the server
    stays as it is: it stores nothing, but carries what processes say of themselves."""
    waits = False
    while full := lack_of_room(directory):
        if not waits:
            log.error("bus_waits_for_room", reason=full)
        waits = True
        state.wait_for(full)
        if await set_within(stop, PERIOD_S):
            return False
    return True


async def follow_directory(server: NatsServer, keys: SecureDirectory, stop: asyncio.Event) -> None:
    """Have the server take over what changes in the directory, and tell runs of new keys, until `stop`.
    Connections by a key that was revoked end at once."""
    told: dict[str, int] = {}
    known, again_s = _lists(keys), 0.0
    while not stop.is_set():
        try:
            found = _lists(keys)
            if found != known:
                server.reload()
                known, again_s = found, 0.0
                log.info("keys_taken_over", runs=sorted(found))
        except (SluiceError, OSError) as error:  # a file is damaged or being replaced, or the bus restarts
            log.warning("keys_not_taken_over", reason=str(error))
        if time.monotonic() >= again_s:
            for run in sorted(run for run, revision in known.items() if told.get(run) != revision):
                if await _tell(server, keys, run):
                    told[run] = known[run]
            again_s = time.monotonic() + TELL_AGAIN_S
        await set_within(stop, LOOK_S)


def _lists(keys: SecureDirectory) -> dict[str, int]:
    return {run: keys.files(run).keys.revision for run in keys.runs}


async def _tell(server: NatsServer, keys: SecureDirectory, run: str) -> bool:
    """Put the list of a run's keys on the bus; return whether it is there. A run that has not begun has no
    place for it."""
    where = BusConfig(url=server.url, creds=keys.files(run).creds("operator"), connect_timeout_s=CONNECT_S)
    try:
        async with Bus.connect(where, run, name="keys") as bus:
            await bus.look_at_role_keys()
    except (BusError, ConfigError) as error:
        log.debug("keys_not_told", run=run, reason=str(error))
        return False
    return True
