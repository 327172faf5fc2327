"""Screens while a connection to the bus is cut, a reader's or one of the run's: what is not known is told as
that, and since when, until the connection is back."""

import asyncio
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from bus.codec import Json
from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.connection.roles import hold_role
from bus.errors import BusAwayError
from bus.server.nats_server import NatsServer
from launch.dashboard.status_watch import StatusWatch
from launch.run_view.run_status import look_at_run
from launch.screens.status_report import report
from launch.screens.watch import watch_run
from launch.settings.run_config import RunConfig
from soak.link import HOST, faulty_link
from tests.launch.messages import actor, learner, storage
from tests.launch.speaking_processes import answer, speaking
from tests.storage.serving import running, until

pytestmark = [pytest.mark.nats, pytest.mark.slow]
WITHIN_S = 60
CLOCK = r"\d\d:\d\d:\d\d \([\d.]+ m?s\)"
RATES = "policy v21 | tokens/s 4321 generated, 3210 trained"
UNKNOWN_RATES = "tokens/s - generated, - trained"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is told sooner, and lines and questions come more often."""
    monkeypatch.setattr("launch.run_view.monitor.SILENT_S", 1.5)
    monkeypatch.setattr("launch.screens.terminal_view.LINE_S", 0.2)
    monkeypatch.setattr("launch.dashboard.status_watch.AWAY_PERIOD_S", 0.2)
    monkeypatch.setattr("bus.streams.stream_reader.ANSWER_TIMEOUT_S", 0.5)


def where(tmp_path: Path, port: int) -> RunConfig:
    return RunConfig(run="test", directory=tmp_path / "runs", bus=BusConfig(url=f"nats://{HOST}:{port}"))


class Screens:
    """A terminal and a page that show the same run."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._text = io.StringIO()
        self._page = StatusWatch("test", lambda run: config)

    async def watch(self, stop: asyncio.Event) -> None:
        await watch_run(self.config, stop, console=Console(file=self._text, width=1000))
        await self._page.close()

    async def line(self, *wanted: str) -> str:
        """The newest line of the terminal, once it has all that is wanted."""
        lines = [""]

        def is_there() -> bool:
            lines[:] = [each for each in self._text.getvalue().splitlines() if " | " in each][-1:] or [""]
            return all(each in lines[0] for each in wanted)

        await until(is_there, seconds=WITHIN_S)
        return lines[0]

    async def page(self, wanted: Callable[[Mapping[str, Json]], object]) -> Mapping[str, Json]:
        """What the page shows, once it is as wanted."""

        def is_there() -> bool:
            self._page.look()
            return bool(wanted(self._page.payload()))

        await until(is_there, seconds=WITHIN_S)
        return self._page.payload()


async def test_a_reader_that_is_cut_off_tells_nothing_as_of_now(bus: Bus, server: NatsServer, tmp_path: Path):
    await answer(bus)
    async with faulty_link(server.port) as link, speaking(bus, storage(), learner(), actor()):
        screens = Screens(where(tmp_path, link.port))
        async with running(screens.watch):
            await screens.line(RATES)
            await screens.page(lambda shown: shown["live"])
            link.flows.clear()
            shown = await screens.line(
                "bus: no answer for ", UNKNOWN_RATES, "learner: silent for ", "1 silent"
            )
            assert "what is shown is older" in shown
            assert "no actors heard" in shown
            page = await screens.page(lambda shown: "the run answered last at" in str(shown["why"]))
            assert (page["live"], page["report"], page["flow"]) == (False, None, [])
            assert re.search(rf"no answer.*the run answered last at {CLOCK}$", str(page["why"])), page["why"]
            with pytest.raises(BusAwayError, match="no answer"):
                await look_at_run(screens.config, asyncio.Event())
            link.flows.set()
            await screens.line(RATES, "1 actors")
            assert not (await screens.page(lambda shown: shown["live"]))["why"]


async def test_parts_whose_connection_is_cut_are_silent_since_then_and_not_told_as_ended(
    bus: Bus, server: NatsServer, tmp_path: Path
):
    await answer(bus)
    async with (
        faulty_link(server.port) as link,
        Bus.connect(where(tmp_path, link.port).bus, "test", name="far") as far,
        hold_role(far, "learner", "a"),
        speaking(bus, storage()),
        speaking(far, learner(), actor()),
    ):
        screens = Screens(where(tmp_path, server.port))
        async with running(screens.watch):
            await screens.line(RATES)
            assert (await status_while(screens, lambda found: not found["problems"]))["state"] == "training"
            link.flows.clear()
            shown = await screens.line(UNKNOWN_RATES, "learner: silent for ", "no actors heard, 1 silent")
            assert "bus:" not in shown
            found = await status_while(screens, lambda found: found["state"] == "unseen")
            silent, nobody = found["problems"]
            assert re.search(rf"^learner was not heard .*, and lives, silent since {CLOCK}$", silent), silent
            assert nobody.startswith("no actor was heard within 1.3 s")
            assert found["rates"]["generated_tokens_per_minute"] is None
            assert found["rates"]["trained_tokens_per_minute"] is None
            page = await screens.page(
                lambda shown: _doing(shown, "Learner").startswith("learner was not heard")
            )
            assert re.search(rf", silent since {CLOCK}$", _doing(page, "Learner"))
            assert _doing(page, "Weights") == "no actor was heard: which weights engines have is not known"
            link.flows.set()
            await screens.line(RATES, "1 actors")
            assert (await status_while(screens, lambda found: not found["problems"]))["state"] == "training"


def _doing(shown: Mapping[str, Json], place: str) -> str:
    return next((str(each["doing"]) for each in shown["flow"] if each["name"] == place), "")


async def status_while(screens: Screens, wanted: Callable[[dict], object]) -> dict:
    """What `launch status` finds, once it is as wanted."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            found = report(await look_at_run(screens.config, asyncio.Event()))
            if wanted(found):
                return found
