"""The dashboard's pages and the objects that they ask for. It changes nothing in any run, but for the note
and the removal that a reader with the token asks for."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from pathlib import Path
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from bus.codec import Json
from bus.errors import ConfigError, SluiceError
from bus.waiting import set_within
from launch.dashboard.access import LOGIN, Access, Address, is_open_to_all
from launch.dashboard.alerts import RunAlerts
from launch.dashboard.charts import CHARTS
from launch.dashboard.curve_feed import CurveFeed, LiveCurves
from launch.dashboard.open_runs import OpenRuns
from launch.dashboard.run_list import facts_of_runs
from launch.dashboard.status_watch import StatusWatch
from launch.dashboard.timeline import timeline
from launch.dashboard.trajectories import one_group, one_trajectory, trajectory_list
from launch.run_view.run_files import RunFiles
from launch.trajectories.held_out import PREFIX
from launch.trajectories.search import LARGEST_NUMBER, TrajectoryFilter
from storage.disk.run_directory import RunDirectory

WEB = Path(__file__).with_name("web")
LOOK_S = 0.5
"""Time between two looks for news of a run that somebody watches."""
LONGEST_WINDOW_S = 3600
"""Longest time that the timeline shows."""
QUIET_S = 15.0
"""Silence after which a line is sent: a connection that broke is noticed by it."""
SMALLEST_COMPRESSED_BYTES = 1024
LARGEST_FORM_BYTES = 4096
LARGEST_CHANGE_BYTES = 16384


class Dashboard:
    """Answers requests about the runs, until `stop`."""

    def __init__(self, runs: OpenRuns, stop: asyncio.Event, *, asks_for_token: bool) -> None:
        """Where readers have shown a token, they may change a run, and see its labels."""
        self._runs = runs
        self._stop = stop
        self._asks_for_token = asks_for_token

    @property
    def routes(self) -> list[Route | Mount]:
        return [
            Route("/", _page),
            Route("/api/runs", self.list_runs),
            Route("/api/runs/{run}", self.run),
            Route("/api/runs/{run}/note", self.note, methods=["POST"]),
            Route("/api/runs/{run}/remove", self.remove, methods=["POST"]),
            Route("/api/runs/{run}/curves", self.curves),
            Route("/api/runs/{run}/steps/{step:int}", self.step),
            Route("/api/runs/{run}/live", self.live),
            Route("/api/runs/{run}/timeline", self.timeline),
            Route("/api/runs/{run}/trajectories", self.list_trajectories),
            Route("/api/runs/{run}/trajectories/{trajectory}", self.trajectory),
            Route("/api/runs/{run}/groups/{lease:int}", self.group),
            Mount("/static", StaticFiles(directory=WEB)),
        ]

    async def list_runs(self, request: Request) -> Response:
        names = self._runs.names()
        facts = await asyncio.to_thread(facts_of_runs, self._runs.root, names)
        return JSONResponse({"directory": str(self._runs.root), "runs": facts})

    async def run(self, request: Request) -> Response:
        name = self._name(request)
        [facts] = await asyncio.to_thread(facts_of_runs, self._runs.root, [name])
        shown: dict[str, Json] = {"charts": [asdict(chart) for chart in CHARTS]}
        return JSONResponse(facts | shown | {"may_change": self._asks_for_token})

    async def note(self, request: Request) -> Response:
        name = self._name(request)
        text = str((await self._change(request)).get("text", ""))
        await asyncio.to_thread(RunDirectory(self._runs.root, name).write_note, text)
        return JSONResponse({"note": text.strip()})

    async def remove(self, request: Request) -> Response:
        """Remove a run that is over, whose name was sent once more."""
        name = self._name(request)
        if (await self._change(request)).get("run") != name:
            raise ConfigError(f"the name of the run does not confirm its removal: send {name!r}")
        await self._runs.remove(name)
        return JSONResponse({"removed": name})

    async def _change(self, request: Request) -> dict[str, Json]:
        """Return what a reader who may change a run has sent. It is JSON, which no page elsewhere can send
        without asking first."""
        if not self._asks_for_token:
            raise HTTPException(
                403, "a run is changed by readers with a token alone: --creds or a token of yours"
            )
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise HTTPException(415, "a change is sent as application/json")
        if not (body := await _body(request, LARGEST_CHANGE_BYTES)):
            raise HTTPException(413, f"a change has 1 to {LARGEST_CHANGE_BYTES} bytes: send a shorter one")
        try:
            sent = json.loads(body)
        except ValueError as error:
            raise HTTPException(400, f"what was sent is not JSON: {error}") from error
        return sent if isinstance(sent, dict) else {}

    async def curves(self, request: Request) -> Response:
        """Answer with the curves as far as they were read; with `all`, those of every quantity."""
        feed = self._runs.curves(self._name(request))
        await feed.refresh()
        everything = "all" in request.query_params
        async with feed.lock:
            payload = await asyncio.to_thread(feed.curves.payload, everything=everything)
        return JSONResponse(payload | {"read": feed.read_fraction, "problem": feed.problem})

    async def step(self, request: Request) -> Response:
        name, step = self._name(request), int(request.path_params["step"])
        found = await asyncio.to_thread(RunFiles(self._runs.root / name).step, step)
        if found is None:
            raise HTTPException(404, f"run {name!r} has recorded no step {step} in {self._runs.root}")
        return JSONResponse({key: value for key, value in found.items() if value == value})

    async def live(self, request: Request) -> Response:
        """Send the curves, and then what changes of them and of the run's status, as it comes."""
        name = self._name(request)
        runs = self._runs
        events = _events(runs.curves(name), runs.status(name), runs.alerts(name), self._stop)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def timeline(self, request: Request) -> Response:
        """Answer with what the learner and the actors did in the last `seconds`, one to 3,600."""
        run = RunDirectory(self._runs.root, self._name(request))
        seconds = _whole("seconds", request.query_params.get("seconds", "300"), 1, LONGEST_WINDOW_S)
        return JSONResponse(await asyncio.to_thread(timeline, run, float(seconds)))

    async def list_trajectories(self, request: Request) -> Response:
        """Answer with the newest trajectories that the query's filters want."""
        held_out, wanted = "held_out" in request.query_params, _wanted(request.query_params)
        if wanted.data_set is not None and not held_out:
            raise ConfigError(
                "data_set is of answers to held-out prompts alone: choose these too, or leave it out"
            )
        source = self._runs.trajectories(self._name(request), held_out=held_out)
        return JSONResponse(await trajectory_list(source, wanted))

    async def trajectory(self, request: Request) -> Response:
        name = self._name(request)
        trajectory = str(request.path_params["trajectory"])
        source = self._runs.trajectories(name, held_out=trajectory.startswith(PREFIX))
        return JSONResponse(await one_trajectory(source, trajectory, labelled=self._shows_labels(name)))

    async def group(self, request: Request) -> Response:
        name = self._name(request)
        source = self._runs.trajectories(name, held_out="held_out" in request.query_params)
        lease = _whole("lease", str(request.path_params["lease"]))
        return JSONResponse(await one_group(source, lease, labelled=self._shows_labels(name)))

    def _shows_labels(self, name: str) -> bool:
        """Return whether readers may see labels: who has shown the token, and whoever could ask the run's bus
        for them."""
        return self._asks_for_token or is_open_to_all(self._runs.root / name)

    def _name(self, request: Request) -> str:
        name = str(request.path_params["run"])
        if name not in self._runs.names():
            raise HTTPException(404, f"there is no run {name!r} in {self._runs.root}")
        return name


async def _events(
    curves: CurveFeed, status: StatusWatch, alerts: RunAlerts, stop: asyncio.Event
) -> AsyncIterator[bytes]:
    """Yield the news of a run until `stop` or until the reader goes, which cancels this."""
    sent, told, quiet_s = LiveCurves(), -1, 0.0
    warned: list[str] | None = None  # a reader who comes back may show some that have gone
    while not stop.is_set():
        status.look()
        await curves.refresh()
        lines: list[bytes] = []
        async with curves.lock:
            news = sent.news(curves)
        if news is not None:
            lines.append(_event("curves", news))
        if status.revision != told:
            told = status.revision
            lines.append(_event("status", status.payload() if told else None))
        found = await asyncio.to_thread(alerts.look, curves.curves.alerts, status.state)
        if found != warned:
            warned = found
            lines.append(_event("alerts", {"alerts": [*found]}))
        quiet_s = 0.0 if lines else quiet_s + LOOK_S
        if quiet_s > QUIET_S:
            quiet_s, lines = 0.0, [b": nothing new\n\n"]
        for line in lines:
            yield line
        await set_within(stop, LOOK_S if curves.read_fraction == 1 else 0.01)


def _wanted(query: Mapping[str, str]) -> TrajectoryFilter:
    """Return the filters of a query. Raises `ConfigError` for one that can choose nothing."""
    given = {name: text for name, text in query.items() if text}
    return TrajectoryFilter(
        step=_whole("step", given["step"]) if "step" in given else None,
        version=_whole("version", given["version"]) if "version" in given else None,
        least_reward=_number("least", given["least"]) if "least" in given else None,
        most_reward=_number("most", given["most"]) if "most" in given else None,
        least_ratio=_number("ratio_least", given["ratio_least"]) if "ratio_least" in given else None,
        most_ratio=_number("ratio_most", given["ratio_most"]) if "ratio_most" in given else None,
        end=given.get("end"),
        source=given.get("source"),
        data_set=given.get("data_set"),
        task=given.get("task"),
        recorded="ratios" in given,
        text=given.get("text"),
        below=_whole("below", given["below"]) if "below" in given else None,
    )


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text[:40]}: it is a number") from error


def _whole(name: str, text: str, least: int = 0, most: int = LARGEST_NUMBER) -> int:
    if text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most:
        return int(text)
    raise ConfigError(f"{name}={text[:40]}: it is a whole number from {least} to {most}")


def _event(name: str, value: Mapping[str, Json] | None) -> bytes:
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


async def _page(request: Request) -> Response:
    return FileResponse(WEB / "index.html")


def application(runs: OpenRuns, address: Address, token: str | None, stop: asyncio.Event) -> Access:
    dashboard = Dashboard(runs, stop, asks_for_token=token is not None)

    async def login(request: Request) -> Response:
        if request.method == "GET":
            return FileResponse(WEB / "login.html")
        if access.is_token(await _form_token(request)):
            return access.let_in(RedirectResponse("/", 303))
        page = (WEB / "login.html").read_text()
        return HTMLResponse(page.replace("<!-- refusal -->", "That is not the token."), 403)

    app = Starlette(
        routes=[Route(LOGIN, login, methods=["GET", "POST"]), *dashboard.routes],
        exception_handlers={SluiceError: _told, OSError: _told},
    )
    app.add_middleware(GZipMiddleware, minimum_size=SMALLEST_COMPRESSED_BYTES)
    access = Access(app, address, token)
    return access


async def _form_token(request: Request) -> str:
    form = await _body(request, LARGEST_FORM_BYTES)
    return parse_qs(form.decode(errors="replace")).get("token", [""])[0]


async def _body(request: Request, most_bytes: int) -> bytes:
    """Return the body that was sent; of a longer one, which is not read to its end, nothing."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > most_bytes:
            return b""
    return body


async def _told(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 404 if isinstance(error, ConfigError) else 503)
