"""The taskset of sums with a tool server, which Sluice does not play."""

import sums_taskset
import verifiers.v1 as vf


class Adder(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class TooledTaskset(sums_taskset.SumTaskset):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.SharedToolsetConfig())]


__all__ = ["TooledTaskset"]
