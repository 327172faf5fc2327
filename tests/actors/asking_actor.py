"""An actor whose engine is offered a version by the learner and never joins the group. It can be killed.

It prints a line when it has the offer. For a line of its standard input it leaves the group."""

import asyncio
import sys

from actors.engines.announced_version import Published
from bus.config import BusConfig
from bus.connection import Bus
from bus.messages import BlobRef, PolicyManifest

BLOB = BlobRef(subject="none", chunks=1, size_bytes=1, digest="0" * 32)


async def ask(url: str) -> None:
    async with Bus.connect(BusConfig(url=url), "test", name="actor") as bus:
        sys.stdout.write("up\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
        manifest = PolicyManifest(policy_version=0, incarnation="one", snapshot=BLOB, model=BLOB, stage="rl")
        published = Published(bus, manifest, None, actor="actor-that-dies")
        offer = await published.offered("", ranks=1, device="cpu")
        async with published.in_group(offer):
            sys.stdout.write(f"{offer[0].group}\n")
            sys.stdout.flush()
            await asyncio.to_thread(sys.stdin.readline)
        await published.leave(offer[0].group)


if __name__ == "__main__":
    asyncio.run(ask(sys.argv[1]))
