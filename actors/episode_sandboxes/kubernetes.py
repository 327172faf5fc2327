"""Sandboxes in pods of Kubernetes, one in each, by its HTTP API (1.30 or later).

A pod ends with its episode, by itself after its longest life, or when the next actor in the pod of one that
was killed finds it; where the actor's own pod is removed, the cluster removes its sandboxes. A network policy
closes their network, where the cluster's network plug-in heeds policies."""

import asyncio
import json
import re
import secrets
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from ipaddress import ip_network
from typing import Any

import aiohttp
import structlog

from actors.episode_sandboxes.base import WORKSPACE, Command, CommandEnd, CommandResult, host_and_port
from actors.episode_sandboxes.containers import END_EXEC, KILLED, OF_MEMORY
from actors.episodes.errors import ToolError, ToolFailedError
from actors.episodes.task import JSON
from actors.sandboxes.owner import OWNER, is_orphan, this_process
from actors.settings.episode_sandboxes import KubernetesSandboxes, SandboxLimits
from bus.errors import ConfigError
from bus.process.plugins import refuse_of_record
from bus.waiting import cancelled

log = structlog.get_logger()
REQUEST_TIMEOUT_S = 60.0
LOOK_S = 0.2
APP = "sluice-sandbox"
PROTOCOL = "v5.channel.k8s.io"
STDIN, STDOUT, STDERR, STATUS, CLOSES = 0, 1, 2, 3, 255
"""First byte of a message: what the others belong to, or that the channel which follows is at its end."""
PART_BYTES = 1 << 18
MOST_CPUS_ASKED = 0.1
"""Processors that a node must have to spare for a pod: sandboxes wait for their model most of the time."""
POLICY: dict[str, JSON] = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": APP},
    "spec": {"podSelector": {"matchLabels": {"app": APP}}, "policyTypes": ["Ingress", "Egress"]},
}
"""Lets nothing into sandboxes, and nothing out of them."""
BEGIN = """
echo $$ > "$0"; cd "$1" || exit 126; shift
mkfifo "$0.1" "$0.2"
cat < "$0.1" & out=$!
cat < "$0.2" >&2 & errors=$!
env "$@" > "$0.1" 2> "$0.2"
status=$?
(sleep 0.2; kill $out $errors) > /dev/null 2>&1 &
wait $out $errors 2> /dev/null
rm -f "$0.1" "$0.2"
exit $status
"""
"""Notes the process of a command, so that it can be ended, and ends also where the command has left something
in the background: the stream lasts until nobody can write on it."""


class KubernetesBackend:
    """Starts pods. Raises ConfigError where nothing says on whose behalf."""

    def __init__(self, config: KubernetesSandboxes) -> None:
        refuse_of_record(f"the sandboxes' api={config.api}", config.api)
        if not config.token_file.is_file():
            raise ConfigError(
                f"sandboxes in Kubernetes: there is no token_file={config.token_file}: run the actor in a "
                "pod whose service account may make pods, or name a file that holds a token"
            )
        self._config = config
        self._session: aiohttp.ClientSession | None = None
        self._opening = asyncio.Lock()
        self._is_open = False
        """Whether the network of pods is closed, and those that others have left are removed."""
        self._gateways: dict[str, _WayOut] = {}
        self._owners: list[JSON] = []
        """The actor's own pod, with which the cluster removes its sandboxes."""

    async def start(self, image: str | None, limits: SandboxLimits, gateway: str | None = None) -> "Pod":
        async with self._opening:
            if not self._is_open:
                await self._open()
                await self._remove_orphans()
                self._is_open = True
            way_out = await self._way_out(gateway) if gateway else None
        pod, within_s = Pod(self, f"{APP}-{secrets.token_hex(8)}"), self._config.start_timeout_s
        try:
            async with asyncio.timeout(within_s):
                await self.asked("POST", "pods", self._described(pod.name, image, limits, way_out))
                while (phase := await pod.phase()) == "Pending":  # noqa: ASYNC110 - it is asked for
                    await asyncio.sleep(LOOK_S)
        except BaseException as error:  # a cancelled start leaves nothing either
            await pod.close()
            if isinstance(error, TimeoutError):
                raise ToolError(f"the pod {pod.name} does not run after {within_s:g} s") from error
            raise
        if phase != "Running":
            await pod.close()
            raise ToolError(f"the pod {pod.name} of {image or self._config.image} has {phase.lower()}")
        return pod

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def asked(self, method: str, path: str, body: JSON = None) -> Mapping[str, JSON]:
        """Ask for something in the namespace; return what is said. Raises ToolError for a refusal, too."""
        status, said = await self.in_namespace(method, path, body)
        if status >= 400:
            raise ToolError(f"{self._config.api} refuses {method} {path}: {said.get('message', status)}")
        return said

    async def in_namespace(self, method: str, path: str, body: JSON = None) -> tuple[int, Mapping[str, JSON]]:
        """Return the status of an answer about something in the namespace, and what it says."""
        return await self._ask(method, f"/api/v1/namespaces/{self._config.namespace}/{path}", body)

    async def _ask(self, method: str, path: str, body: JSON = None) -> tuple[int, Mapping[str, JSON]]:
        """Return the status of an answer and what it says. Raises ToolError where there is none."""
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(REQUEST_TIMEOUT_S),
                self._session.request(
                    method, self._config.api + path, json=body, headers=self._key()
                ) as answer,
            ):
                said = await answer.json()
                return answer.status, said if isinstance(said, Mapping) else {}
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ToolError(f"{self._config.api} does not answer: {error!r}") from error

    async def exec(self, pod: str, words: Sequence[str]) -> aiohttp.ClientWebSocketResponse:
        """Begin a command, and return the stream of its input and output. Raises ToolFailedError."""
        assert self._session is not None
        asked = [("command", word) for word in words]
        asked += [(name, "true") for name in ("stdin", "stdout", "stderr")]
        url = f"{self._config.api}/api/v1/namespaces/{self._config.namespace}/pods/{pod}/exec"
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await self._session.ws_connect(
                    url, params=asked, protocols=(PROTOCOL,), headers=self._key(), max_msg_size=0
                )
        except aiohttp.WSServerHandshakeError as error:
            raise ToolFailedError(f"the pod {pod} has ended: {error.message}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ToolError(f"{self._config.api} does not answer: {error!r}") from error

    async def _way_out(self, gateway: str) -> "_WayOut":
        """Let pods out to a gateway, and return the way. Raises ToolError."""
        if gateway not in self._gateways:
            try:
                host, port = host_and_port(gateway)
                way_out = _WayOut(host, port, await _addresses(host))
            except (OSError, ValueError) as error:
                raise ToolError(f"the gateway {gateway!r} has no address: {error}") from error
            await self._add_policy(way_out.policy())
            self._gateways[gateway] = way_out
        return self._gateways[gateway]

    async def _add_policy(self, policy: JSON) -> None:
        path = f"/apis/networking.k8s.io/v1/namespaces/{self._config.namespace}/networkpolicies"
        status, said = await self._ask("POST", path, policy)
        if status >= 400 and status != 409:  # 409: there is such a policy already
            raise ToolError(f"{self._config.api} closes no pod's network: {said.get('message', status)}")

    async def _open(self) -> None:
        """Open connections, and close the network of pods that are to come. Raises ToolError."""
        certificate = self._config.certificate
        try:
            tls = ssl.create_default_context(cafile=certificate) if certificate != "host" else True
        except OSError as error:
            raise ToolError(f"certificate={certificate} of Kubernetes cannot be read: {error}") from error
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=tls))
        await self._add_policy(POLICY)
        self._owners = await self._own_pod()

    async def _own_pod(self) -> list[JSON]:
        name = socket.gethostname()
        status, said = await self.in_namespace("GET", f"pods/{name}")
        about, now = said.get("metadata"), said.get("status")
        if status != 200 or not isinstance(about, Mapping) or not isinstance(now, Mapping):
            return []
        try:
            is_this = now.get("podIP") in await _addresses(name)
        except OSError:  # the name has no address here
            is_this = False
        if not is_this:  # a pod that has this host's name by chance
            return []
        return [{"apiVersion": "v1", "kind": "Pod", "name": name, "uid": about["uid"]}]

    async def _remove_orphans(self) -> None:
        """Remove pods that actors have left whose containers ran in this actor's pod. Raises ToolError."""
        found: Any = (await self.asked("GET", f"pods?labelSelector={OWNER}")).get("items")
        for about in (one["metadata"] for one in found):
            if is_orphan(about["labels"][OWNER]):
                log.info("orphaned_sandbox_removed", pod=about["name"])
                await self.in_namespace("DELETE", f"pods/{about['name']}")

    def _key(self) -> dict[str, str]:
        """Return the header of the token, which a cluster renews in its file."""
        return {"Authorization": f"Bearer {self._config.token_file.read_text().strip()}"}

    def _described(
        self, name: str, image: str | None, limits: SandboxLimits, way_out: "_WayOut | None"
    ) -> JSON:
        space = {"memory": f"{limits.memory_mb}Mi", "ephemeral-storage": f"{limits.disk_mb}Mi"}
        life_s = f"{self._config.life_s:.0f}"
        container: JSON = {
            "name": "sandbox",
            "image": image or self._config.image,
            "command": ["/bin/sh", "-c", f"sleep {life_s} & wait"],
            "workingDir": WORKSPACE,
            "env": [{"name": "HOME", "value": WORKSPACE}],
            "resources": {
                "limits": {**space, "cpu": f"{limits.cpus:g}"},
                "requests": {**space, "cpu": f"{min(limits.cpus, MOST_CPUS_ASKED):g}"},
            },
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
        return {
            "metadata": {
                "name": name,
                "labels": {"app": APP, OWNER: this_process(), "gateway": way_out.name if way_out else ""},
                "ownerReferences": self._owners,
            },
            "spec": {
                "hostAliases": way_out.aliases() if way_out else [],
                "containers": [container],
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "activeDeadlineSeconds": int(self._config.life_s),
                "terminationGracePeriodSeconds": 0,
            },
        }


@dataclass(frozen=True, slots=True)
class _WayOut:
    host: str
    port: int
    addresses: tuple[str, ...]

    @property
    def name(self) -> str:
        told = " ".join((*self.addresses, str(self.port)))
        return f"{APP}-{blake2b(told.encode(), digest_size=8).hexdigest()}"

    def aliases(self) -> list[JSON]:
        """Return how pods find the host without name servers; what is an address itself needs none."""
        return [{"ip": one, "hostnames": [self.host]} for one in self.addresses if one != self.host]

    def policy(self) -> JSON:
        blocks = [{"ipBlock": {"cidr": str(ip_network(address))}} for address in self.addresses]
        return {
            **POLICY,
            "metadata": {"name": self.name},
            "spec": {
                "podSelector": {"matchLabels": {"gateway": self.name}},
                "policyTypes": ["Egress"],
                "egress": [{"to": blocks, "ports": [{"protocol": "TCP", "port": self.port}]}],
            },
        }


async def _addresses(host: str) -> tuple[str, ...]:
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(sorted({str(one[4][0]) for one in found}))


class Pod:
    """One pod."""

    def __init__(self, backend: KubernetesBackend, name: str) -> None:
        self.name = name
        self._backend = backend
        self._killed = 0
        """Processes that the kernel has killed for lack of memory, as far as is known."""

    async def phase(self) -> str:
        """Return what has become of the pod. Raises ToolError."""
        status = (await self._backend.asked("GET", f"pods/{self.name}")).get("status")
        return str(status.get("phase", "Pending")) if isinstance(status, Mapping) else "Pending"

    async def run(self, command: Command) -> CommandResult:
        """Carry out a command. Raises ToolFailedError where the pod has ended, else ToolError."""
        started, note = time.monotonic(), f"/tmp/.sluice-{secrets.token_hex(8)}"
        variables = [f"{name}={value}" for name, value in command.variables.items()]
        words = ("/bin/sh", "-c", BEGIN, note, command.directory, *variables, *command.words)
        stream = await self._backend.exec(self.name, words)
        exchange = _Exchange(stream, command.timeout_s, command.stdin, command.output_bytes)
        try:
            end = await exchange.ended()
        finally:
            if not exchange.has_exited:
                await self._kill(note)
        if exchange.status == KILLED and await self._lacked_memory():
            end = "memory"
        stdout, stderr = (bytes(exchange.outputs[kind][: command.output_bytes]) for kind in (STDOUT, STDERR))
        return CommandResult(
            stdout=stdout, stderr=stderr, end=end, status=exchange.status, took_s=time.monotonic() - started
        )

    async def reach(self, gateway: str) -> tuple[str, socket.socket | None]:
        """Return the address of the gateway: a network policy lets the pod go there."""
        return gateway, None

    async def close(self) -> None:
        status, said = await self._backend.in_namespace("DELETE", f"pods/{self.name}")
        if status >= 400 and status != 404:
            log.warning("pod_is_not_removed", pod=self.name, reason=str(said.get("message", status)))

    async def _kill(self, note: str) -> None:
        """End a command with all of its session; what began a session of its own ends with the pod."""
        words = ("/bin/sh", "-c", END_EXEC, note)
        await _Exchange(await self._backend.exec(self.name, words), REQUEST_TIMEOUT_S).ended()

    async def _lacked_memory(self) -> bool:
        """Return whether the kernel has killed further processes at the pod's limit of memory."""
        words = ("/bin/sh", "-c", f"cat {OF_MEMORY} 2>/dev/null")
        exchange = _Exchange(await self._backend.exec(self.name, words), REQUEST_TIMEOUT_S)
        await exchange.ended()
        before, found = self._killed, re.search(rb"^oom_kill (\d+)$", exchange.outputs[STDOUT], re.MULTILINE)
        self._killed = int(found[1]) if found else 0
        return self._killed > before


class _Exchange:
    def __init__(
        self,
        stream: aiohttp.ClientWebSocketResponse,
        timeout_s: float,
        stdin: bytes = b"",
        most: int = 1 << 16,
    ) -> None:
        self.outputs = {STDOUT: bytearray(), STDERR: bytearray()}
        self.status = KILLED
        """Exit status, as far as one was told."""
        self.has_exited = False
        self._stream = stream
        self._timeout_s = timeout_s
        self._stdin = stdin
        self._most = most

    async def ended(self) -> CommandEnd:
        """Wait until the command has ended or passed a limit. Raises ToolFailedError."""
        sending = asyncio.create_task(self._send(), name="input of a command")
        try:
            async with asyncio.timeout(self._timeout_s):
                async for message in self._stream:
                    self._note(message.data)
                    if any(len(output) > self._most for output in self.outputs.values()):
                        return "output"
                    if self.has_exited:
                        return "exited"
        except TimeoutError:
            return "time"
        finally:
            await cancelled(sending)
            await self._stream.close()
        raise ToolFailedError("the pod has ended with its command")

    async def _send(self) -> None:
        try:
            for start in range(0, len(self._stdin), PART_BYTES):
                await self._stream.send_bytes(bytes([STDIN]) + self._stdin[start : start + PART_BYTES])
            await self._stream.send_bytes(bytes([CLOSES, STDIN]))
        except ConnectionError:
            return  # the command reads no more

    def _note(self, data: bytes) -> None:
        kind, rest = data[0], data[1:]
        if kind in self.outputs:
            self.outputs[kind] += rest
        elif kind == STATUS:
            said = json.loads(rest)
            causes = said.get("details", {}).get("causes", [])
            codes = [int(one["message"]) for one in causes if one.get("reason") == "ExitCode"]
            self.status = 0 if said["status"] == "Success" else next(iter(codes), KILLED)
            self.has_exited = True
