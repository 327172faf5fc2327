"""What an engine received, and damage to what it reads."""

import asyncio

from benchmarks.scripted_engine import ScriptedEngine


class Recording(ScriptedEngine):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__(lambda tokens: [1], policy_version=-1)
        self.given = []
        self.state = {}
        self.taking = asyncio.Event()
        self.taking.set()

    async def load_weights(self, state, policy_version):
        await self.taking.wait()
        self.given.append((policy_version, set(state)))
        self.state |= {name: tensor.clone() for name, tensor in state.items()}
        return await super().load_weights(state, policy_version)


async def damage(bus, blob, *, flip):
    """Flip a bit of the last chunk, or take it away."""
    subject, stream = f"{blob.subject}.{blob.chunks - 1}", bus.topology.stream("WEIGHTS")
    if not flip:
        await bus.js.purge_stream(stream, subject=subject)
        return
    data = bytearray((await bus.js.get_last_msg(stream, subject, direct=True)).data)
    data[len(data) // 2] ^= 1
    await bus.js.publish(subject, bytes(data))
