"""Sandboxes of E2B, by its package `e2b`, which reads its key from E2B_API_KEY."""

from collections.abc import AsyncIterator
from functools import partial

import e2b
import httpx
from e2b import AsyncSandbox

from actors.episode_sandboxes.hosted import WayOut, told
from actors.episode_sandboxes.hosted_commands import HostedSandbox
from actors.sandboxes.owner import OWNER
from actors.settings.episode_sandboxes import HostedSandboxes, SandboxLimits

USER = "root"
failures = partial(
    told,
    "e2b",
    ended=(e2b.SandboxNotFoundException, e2b.SandboxNotRunningException),
    other=(e2b.SandboxException, e2b.AuthenticationException, e2b.ServiceBusyException, httpx.HTTPError),
)


class E2BSandbox:
    """One sandbox of E2B."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox

    async def shell(self, script: str, timeout_s: float) -> str:
        with failures():
            ran = await self._sandbox.commands.run(script, user=USER, timeout=timeout_s)
        return str(ran.stdout)

    async def put(self, path: str, data: bytes) -> None:
        with failures():
            await self._sandbox.files.write(path, data, user=USER)

    async def get(self, path: str) -> bytes:
        with failures():
            return bytes(await self._sandbox.files.read(path, format="bytes", user=USER))

    async def end(self) -> None:
        with failures():
            await self._sandbox.kill()


class E2BService:
    """Starts sandboxes of E2B. Their template says how much memory and how many processors they have."""

    def __init__(self, config: HostedSandboxes) -> None:
        self._life_s = int(config.life_s)

    async def start(self, image: str, limits: SandboxLimits, owner: str, way_out: WayOut) -> HostedSandbox:
        with failures():
            sandbox = await AsyncSandbox.create(
                image, timeout=self._life_s, metadata={OWNER: owner},
                network={"allow_out": [*way_out.networks, *way_out.names], "deny_out": [e2b.ALL_TRAFFIC]},
            )  # fmt: skip
        return E2BSandbox(sandbox)

    async def owned(self) -> AsyncIterator[tuple[str, HostedSandbox]]:
        with failures():
            pages = AsyncSandbox.list()
            while pages.has_next:
                for found in await pages.next_items():
                    if owner := (found.metadata or {}).get(OWNER):
                        yield owner, _Left(found.sandbox_id)

    async def close(self) -> None:
        """Do nothing: the package keeps its connections for the process."""


class _Left(E2BSandbox):
    """A sandbox that somebody has left, which can be ended without being asked how it is."""

    def __init__(self, sandbox_id: str) -> None:
        self._id = sandbox_id

    async def end(self) -> None:
        with failures():
            await AsyncSandbox.kill(self._id)
