"""An episode that calls the tools of a sandbox."""

from actors.episodes.task import Task
from actors.tools.episode_tools import EpisodeTools


class Episode:
    """Calls of one episode."""

    def __init__(self, tools, **metadata):
        self._tools, self._episode = tools, EpisodeTools(Task(task_id="t", prompt="x", metadata=metadata))
        self.close = self._episode.close

    async def __call__(self, tool, **arguments):
        return await self._episode.call(self._tools[tool], arguments)

    async def said(self, tool, **arguments):
        result = await self(tool, **arguments)
        assert not result.failed, result.text
        return result.text
