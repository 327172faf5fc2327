"""The dashboard in a real browser: what it shows, on two sizes and in two colour schemes, by keyboard.

With DASHBOARD_PICTURES=docs/pictures the pictures of the documentation are made anew."""

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bus.codec import encode
from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.messages import Status
from bus.server.nats_server import NatsServer
from bus.streams.publish import Publisher
from launch.dashboard.open_runs import OpenRuns
from launch.run_view import run_status
from launch.settings.run_config import RunConfig
from soak.link import HOST, faulty_link
from storage.disk.atomic_files import write_json
from storage.metrics.records import append_records, metrics_record
from tests.launch.dashboard.run_on_disk import make_run, make_supervised_run, write_held_out_answers
from tests.launch.dashboard.served_page import TOKEN, no_bus, served
from tests.launch.messages import actor, learner, metrics, storage
from tests.launch.speaking_processes import answer, speaking
from tests.storage.serving import manifest, running

playwright = pytest.importorskip("playwright.async_api", reason="no playwright: pip install playwright")
axe_playwright = pytest.importorskip("axe_playwright_python.async_playwright", reason="no axe: see [dev]")
Page = playwright.Page
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
]
LOOKS = [
    pytest.param(1280, "light"),
    pytest.param(390, "dark"),
    pytest.param(390, "light", marks=pytest.mark.nightly),
    pytest.param(1280, "dark", marks=pytest.mark.nightly),
]
LONGEST_S = 5.0
"""Time within which the page says why the learner waits."""


@asynccontextmanager
async def opened(
    url: str, width: int = 1280, scheme: str = "light", *, expected: str | None = None
) -> AsyncIterator[Page]:
    """A page of a fresh browser; anything that its console complains about, but for what is `expected`,
    fails the test."""
    complaints: list[str] = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.on(
            "request", lambda asked: complaints.append(asked.url) if not asked.url.startswith(url) else None
        )
        await page.goto(url)
        yield page
        await browser.close()
    assert [one for one in complaints if expected is None or expected not in one] == []


async def go(page: Page, url: str, place: str, wanted: str) -> None:
    """Open a view, and wait for what it shows last."""
    await page.goto(f"{url}/#/{place}")
    await page.locator(wanted).first.wait_for()


async def check(page: Page) -> None:
    """The page has no horizontal scrolling and nothing that axe finds wrong."""
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), page.url
    found = await axe_playwright.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def picture(name: str, tmp_path: Path) -> Path:
    return Path(os.environ.get("DASHBOARD_PICTURES", tmp_path)).absolute() / f"{name}.png"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of two runs that are done."""
    root = tmp_path_factory.mktemp("runs")
    make_run(root, "sort-a", steps=120)
    make_run(root, "sort-b", steps=90, seed=1)
    return root


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
async def test_every_view_fits_and_can_be_read_by_all(root: Path, tmp_path: Path, width: int, scheme: str):
    async with served(OpenRuns(root, no_bus)) as url, opened(url, width, scheme) as page:
        await go(page, url, "", ".runs tbody tr:nth-child(2)")
        await check(page)
        await go(page, url, "runs/sort-a", ".chart canvas")
        await page.get_by_text("The run is complete.").wait_for()
        label = await page.locator("figure", has_text="Held-out evaluation").get_attribute("aria-label")
        assert label.startswith("Held-out evaluation at step 120: sampled 0.86"), label
        assert await page.locator(".chart:visible canvas").count() == 15
        shares = await page.locator("figure", has_text="Distribution of importance weights").get_attribute(
            "aria-label"
        )
        assert ": to 0.5 0.02, to 0.8 0.05, to 0.95 0.13, 0.95 to 1.05 0.6, to 1.25 0.14" in shares, shares
        shares = await page.locator("figure", has_text="Distribution of staleness").get_attribute(
            "aria-label"
        )
        assert ": 0 0.2, 1 0.5, 2 0.3, 3 to 4 0," in shares, shares
        await check(page)
        if (width, scheme) == (390, "dark"):
            await page.screenshot(path=picture("dashboard_narrow", tmp_path))
        await go(page, url, "compare/sort-a,sort-b", ".charts .chart:nth-child(12) canvas")
        await check(page)
        if (width, scheme) == (1280, "light"):
            await page.screenshot(path=picture("dashboard_comparison", tmp_path))
        await go(page, url, "runs/sort-a/timeline", ".lane rect.trains")
        await check(page)
        if (width, scheme) == (1280, "light"):
            await page.locator("main").screenshot(path=picture("dashboard_timeline", tmp_path))
        await go(page, url, "runs/sort-a/trajectories/g00000007.1", ".turn .tokens")
        await check(page)
        if (width, scheme) == (1280, "light"):
            await page.screenshot(path=picture("dashboard_trajectory", tmp_path))
        await go(page, url, "runs/sort-a/trajectories/g00000007", ".answers article")
        await check(page)
        if (width, scheme) == (1280, "light"):
            await page.screenshot(path=picture("dashboard_group", tmp_path))


async def test_an_address_opens_a_run_a_step_and_a_trajectory_also_after_a_reload(root: Path):
    async with served(OpenRuns(root, no_bus)) as url, opened(url, 390) as page:
        await go(page, url, "runs/sort-a", ".chart canvas")
        await page.get_by_role("link", name="120", exact=True).click()
        for _ in range(2):
            await page.get_by_role("heading", name="Step 120", exact=True).wait_for()
            link = page.get_by_role("link", name="g00000011.1")
            await link.wait_for()
            await page.get_by_text("policy/entropy_nats").wait_for()
            assert page.url == f"{url}/#/runs/sort-a/steps/120"
            await check(page)
            await page.reload()
        await page.get_by_role("link", name="step before").click()
        await page.get_by_role("heading", name="Step 119", exact=True).wait_for()
        await page.go_back()
        await link.click()
        for _ in range(2):
            await page.get_by_role("heading", name="g00000011.1").wait_for()
            assert page.url == f"{url}/#/runs/sort-a/trajectories/g00000011.1"
            await page.reload()


async def test_a_reader_with_the_token_notes_something_and_removes_the_run(tmp_path: Path):
    make_run(tmp_path, "old", steps=3)
    make_run(tmp_path, "good", steps=3)

    async def remove(name: str) -> None:
        shutil.rmtree(tmp_path / name)

    runs = OpenRuns(tmp_path, no_bus, remove=remove)
    async with served(runs, token=TOKEN) as url, opened(url, 390, expected="404") as page:
        await page.locator("input[type=password]").fill(TOKEN)
        await page.keyboard.press("Enter")
        await page.locator(".runs tbody tr").first.wait_for()
        await go(page, url, "runs/old", ".chart canvas")
        await page.get_by_text("Note and removal").click()
        await page.get_by_label("Note", exact=True).fill("a first try")
        await page.get_by_text("Keep the note").click()
        await page.get_by_text("The note is kept.").wait_for()
        await page.reload()
        assert await page.get_by_label("Note", exact=True).input_value() == "a first try"
        await check(page)
        again = page.get_by_label("Name of the run once more")
        await again.fill("good")
        await page.get_by_text("Remove the run").click()
        await page.get_by_text("does not confirm its removal").wait_for()
        await again.fill("old")
        await page.get_by_text("Remove the run").click()
        await page.locator(".runs tbody tr").first.wait_for()
        assert await page.locator(".runs tbody th").all_inner_texts() == ["good"]
    assert not (tmp_path / "old").exists()


@pytest.mark.slow
async def test_runs_on_pairs_are_drawn_and_compared_by_what_they_have(tmp_path: Path):
    for name, margin in (("dpo-a", 0.01), ("dpo-b", 0.02)):
        make_supervised_run(tmp_path, name, margin=margin)
    async with served(OpenRuns(tmp_path, no_bus)) as url, opened(url) as page:
        await go(page, url, "runs/dpo-a", ".chart canvas")
        await page.get_by_text("held-out loss").wait_for()
        facts = await page.locator(".facts").inner_text()
        assert "20 of 20" in " ".join(facts.split()), facts
        shown = [
            await each.get_attribute("aria-label") for each in await page.locator("figure:visible").all()
        ]
        titles = ("Supervised loss", "Preference accuracy", "Preference rewards", "Supervised tokens")
        assert [label.partition(" at step 20")[0] for label in shown] == [*titles]
        assert "loss 0.593" in shown[0], shown[0]
        assert "held out 0.633" in shown[0], shown[0]
        await check(page)
        await go(page, url, "compare/dpo-a,dpo-b", ".charts .chart canvas")
        accuracy = page.locator("figure", has_text="Preference accuracy, held out")
        assert "dpo-a 0.75, dpo-b 0.75" in await accuracy.get_attribute("aria-label")
        margins = page.locator("figure", has_text="Preference rewards, margin")
        assert "dpo-a 0.2, dpo-b 0.4" in await margins.get_attribute("aria-label")
        await check(page)


@pytest.mark.nightly
async def test_keys_move_along_a_curve_and_over_tokens_and_choose_runs(root: Path):
    async with served(OpenRuns(root, no_bus)) as url, opened(url) as page:
        await go(page, url, "runs/sort-a", ".chart canvas")
        chart = page.locator("figure", has_text="Reward").first
        await chart.focus()
        for _ in range(3):
            await page.keyboard.press("ArrowLeft")
        assert (await chart.get_attribute("aria-label")).startswith("Reward at step 117: ")
        other = page.locator("figure", has_text="Loss").first
        assert (await other.get_attribute("aria-label")).startswith("Loss at step 117: ")
        await page.get_by_role("button", name="time").press("Enter")
        assert "after" in await chart.get_attribute("aria-label")

        await go(page, url, "runs/sort-a/trajectories/g00000007.1", ".turn .tokens")
        await page.locator(".tokens[tabindex]").first.focus()
        await page.keyboard.press("ArrowRight")
        await page.keyboard.press("ArrowRight")
        told = await page.locator(".told").inner_text()
        assert told.startswith("Token 7 “smallest ”: log-prob "), told
        assert "version 119, trained, importance ratio 0.4" in told, told
        shades = page.locator(".tokens[tabindex] span")
        assert await shades.first.get_attribute("data-shade") in {f"p{n}" for n in range(5)}
        await page.get_by_role("button", name="version").press("Enter")
        assert await shades.first.get_attribute("data-shade") == "v0"

        await go(page, url, "", ".runs tbody tr:nth-child(2)")
        await page.get_by_label("Compare sort-b").press("Space")
        await page.get_by_label("Compare sort-a").press("Space")
        await page.locator("section[aria-label=Comparison] li", has_text="sort-a").first.wait_for()
        assert page.url.endswith("#/compare/sort-b,sort-a")


@pytest.mark.nightly
async def test_importance_ratios_are_shown_where_the_learner_recorded_them_and_else_why_not(root: Path):
    async with served(OpenRuns(root, no_bus)) as url, opened(url) as page:
        await go(page, url, "runs/sort-a/trajectories", ".trajectories a")
        await page.get_by_label("with a ratio of each token").check()
        await page.get_by_text("2 trajectories, newest first").wait_for()
        await page.locator(".trajectories a", has_text="g00000007.1").press("Enter")
        await page.get_by_role("button", name="importance ratio").press("Enter")
        explained = page.locator(".detail [role=status]").first
        said = "Importance ratio: the learner's policy v119, before step 119, over the policy that sampled"
        await explained.get_by_text(said).wait_for()
        shades = page.locator(".tokens[tabindex] span")
        assert await shades.first.get_attribute("data-shade") == "r4"
        assert await shades.last.get_attribute("data-shade") == "r0"
        await check(page)
        await page.get_by_label("with a ratio of each token").uncheck()
        await page.locator(".trajectories a", has_text="g00000007.0").press("Enter")
        await page.locator(".detail h2", has_text="g00000007.0").wait_for()
        await page.get_by_role("button", name="importance ratio").press("Enter")
        await explained.get_by_text("The learner recorded no log-probs of this trajectory").wait_for()
        assert await shades.first.get_attribute("data-shade") == ""


async def test_filters_choose_and_say_what_is_wrong(root: Path):
    async with served(OpenRuns(root, no_bus)) as url, opened(url) as page:
        await go(page, url, "runs/sort-a/trajectories", ".trajectories a")
        assert await page.locator(".trajectories a").count() == 24
        await page.get_by_label("step").fill("119")
        await page.get_by_label("reward from").fill("0.5")
        await page.keyboard.press("Enter")
        await page.get_by_text("4 trajectories, newest first, of 12 complete groups", exact=True).wait_for()
        await page.locator(".trajectories a").first.press("Enter")
        await page.locator(".detail h2", has_text="g00000007.1").wait_for()
        await page.get_by_text("Trained in step 119 with weight 1.", exact=True).wait_for()
        facts = await page.locator(".facts").inner_text()
        for shown in ("advantage\n0.5", "reward: format\n1", "label\nlabel 2", "tokens\n24, 16 in the mask"):
            assert shown in facts, facts
        await page.get_by_role("link", name="Side by side").press("Enter")
        answers = page.locator(".answers article")
        await answers.nth(1).wait_for()
        texts = await answers.all_inner_texts()
        assert [text.split()[0] for text in texts] == ["g00000007.0", "g00000007.1"]
        assert "advantage\n-0.5" in texts[0]
        assert "the smallest of them" in texts[1]
        await answers.nth(0).get_by_role("link").press("Enter")
        await page.locator(".detail h2", has_text="g00000007.0").wait_for()
        await page.get_by_label("task").fill("task-6")
        await page.get_by_text("1 trajectory, newest first").wait_for()
        await page.get_by_label("source").fill("none has this one")
        await page.get_by_text("0 trajectories").wait_for()
        await page.locator("select[name=end]").select_option("timeout")
        await page.get_by_text("0 trajectories").wait_for()


async def test_answers_to_held_out_prompts_are_shown_as_what_they_are(tmp_path: Path):
    run = make_run(tmp_path, "measured", steps=5)
    write_held_out_answers(run, 3)
    async with served(OpenRuns(tmp_path, no_bus)) as url, opened(url) as page:
        await go(page, url, "runs/measured/trajectories", ".trajectories a")
        await page.get_by_label("answers to held-out prompts").check()
        await page.get_by_text("4 trajectories, newest first, of 2 complete groups", exact=True).wait_for()
        assert await page.locator(".trajectories a", has_text="held out").count() == 4
        await page.locator(".trajectories a", has_text="h00000001.1").press("Enter")
        said = "Held out of training, evaluated at version 3 on heldout, greedy."
        await page.get_by_text(said, exact=True).wait_for()
        await check(page)
        await page.get_by_role("link", name="Side by side").press("Enter")
        await page.get_by_role("heading", name="Answers to held-out prompt h00000001").wait_for()
        assert await page.locator(".answers article").count() == 2


@pytest.mark.nightly
async def test_text_is_searched_and_a_search_that_stopped_early_says_so(root: Path, monkeypatch):
    monkeypatch.setattr("launch.dashboard.trajectories.SEARCHED", 4)
    async with served(OpenRuns(root, no_bus)) as url, opened(url) as page:
        await go(page, url, "runs/sort-a/trajectories", ".trajectories a")
        await page.get_by_label("text").fill("Smallest of")
        await page.keyboard.press("Enter")
        status = page.locator(".listing .hint")
        await page.get_by_text("; the search stopped after 4 of them").wait_for()
        assert (await status.inner_text()).startswith("8 trajectories, newest first, of 12 complete groups")
        await page.get_by_role("button", name="Search older ones").press("Enter")
        await page.get_by_text("16 trajectories").wait_for()
        await page.get_by_label("text").fill("nowhere")
        await page.get_by_text("0 trajectories").wait_for()
        assert "stopped after 4 of them" in await status.inner_text()


async def test_alerts_come_and_go_with_the_steps(tmp_path: Path):
    run = make_run(tmp_path, "warned", steps=3)
    async with served(OpenRuns(tmp_path, no_bus)) as url, opened(url, 390) as page:
        await go(page, url, "runs/warned", ".chart canvas")
        alerts = page.locator("section[aria-label=Alerts]")
        assert not await alerts.is_visible()
        append_records(run.metrics, [metrics_record(metrics(4, **{"policy/ess_fraction": 0.1}))])
        await alerts.get_by_text(
            "Policy/ess_fraction is 0.1, below 0.3: few tokens carry the update"
        ).wait_for()
        await check(page)
        append_records(run.metrics, [metrics_record(metrics(5, **{"policy/ess_fraction": 0.9}))])
        await alerts.wait_for(state="hidden")


@pytest.mark.nightly
async def test_lanes_are_told_in_words(root: Path):
    async with served(OpenRuns(root, no_bus)) as url, opened(url) as page:
        await go(page, url, "runs/sort-a/timeline", ".lane rect.busy")
        actor_lane = page.get_by_role("img", name="actor-0")
        label = await actor_lane.get_attribute("aria-label")
        assert label.startswith(
            "actor-0: engines busy 75 %, 23 new versions seen, paused 46 ms in all, now v120"
        ), label
        await page.get_by_role("button", name="5 min").press("Enter")
        await page.locator("[aria-label*='119 new versions seen']").wait_for()


async def test_a_new_step_is_drawn_when_it_is_recorded(root: Path, tmp_path: Path):
    run = make_run(tmp_path, "grows", steps=3)
    async with served(OpenRuns(tmp_path, no_bus)) as url, opened(url) as page:
        await go(page, url, "runs/grows", "figure[aria-label^='Reward at step 3:']")
        append_records(run.metrics, [metrics_record(metrics(4, reward=0.123))])
        await page.locator("figure[aria-label^='Reward at step 4: reward 0.123.']").wait_for()


@pytest.mark.nightly
async def test_a_view_that_is_left_before_its_first_answer_asks_no_more(root: Path):
    late: list[tuple[playwright.Route, str]] = []
    asked: list[str] = []

    async def hold(route: playwright.Route) -> None:
        late.append(route)

    async with served(OpenRuns(root, no_bus)) as url, opened(url) as page:
        await page.route("**/api/runs/sort-a", hold)
        await page.route("**/api/runs/sort-a/timeline*", hold)
        await page.add_init_script("window.timers = 0; setInterval = () => { window.timers += 1; };")
        await page.reload()
        page.on("request", lambda request: asked.append(request.url))
        for place in ("runs/sort-a", "runs/sort-a/timeline"):
            async with page.expect_request(f"**/api/{place}*"):
                await page.evaluate("place => { location.hash = `#/${place}`; }", place)
            await go(page, url, "", ".runs tbody tr:nth-child(2)")
            async with page.expect_response(f"**/api/{place}*"):
                await late.pop().continue_()
        await page.evaluate("fetch('/api/runs/sort-b').then((answer) => answer.json())")  # and all before it
        assert await page.evaluate("window.timers") == 0
    assert [one for one in asked if one.endswith("/live")] == []


async def test_a_slow_answer_does_not_replace_a_newer_one(root: Path):
    late: list[playwright.Route] = []

    async def hold(route: playwright.Route) -> None:
        late.append(route)

    async with served(OpenRuns(root, no_bus)) as url, opened(url) as page:
        await page.route("**/trajectories?step=119", hold)
        await go(page, url, "runs/sort-a/trajectories", ".trajectories a")
        async with page.expect_request("**/trajectories?step=119"):
            await page.get_by_label("step").fill("119")
        await page.get_by_label("step").fill("")
        await page.get_by_label("reward from").fill("0.5")
        wanted = page.get_by_text("12 trajectories, newest first, of 12 complete groups", exact=True)
        await wanted.wait_for()
        async with page.expect_response("**/trajectories?step=119"):
            await late.pop().continue_()
        await page.evaluate("fetch('/api/runs/sort-b').then((answer) => answer.json())")
        await wanted.wait_for(timeout=1000)
        assert await page.locator(".trajectories a").count() == 12


async def test_a_reader_whose_cookie_is_refused_is_led_to_the_login_page(root: Path):
    async def refuse(route: playwright.Route) -> None:
        await route.request.frame.page.context.clear_cookies()
        await route.fulfill(status=401)

    async with (
        served(OpenRuns(root, no_bus), token=TOKEN) as url,
        opened(url, expected="401 (Unauthorized)") as page,
    ):
        await page.get_by_label("Token of this dashboard").fill(TOKEN)
        await page.keyboard.press("Enter")
        await page.locator(".runs tbody tr").first.wait_for()
        await page.route("**/api/runs/sort-a/live", refuse)
        await page.goto(f"{url}/#/runs/sort-a")
        await page.get_by_label("Token of this dashboard").wait_for()


async def test_why_a_run_does_not_answer_is_said(tmp_path: Path):
    run = make_run(tmp_path, "silent", steps=3)
    write_json(run.path / "progress.json", {"stage": "rl", "step": 3, "policy_version": 4})
    async with served(OpenRuns(tmp_path, no_bus)) as url, opened(url) as page:
        await page.goto(f"{url}/#/runs/silent")
        await page.locator(".words", has_text="(nobody knows the bus of silent)").wait_for()
        write_json(run.ending, {"state": "failed", "problem": "learner: no GPU"})
        make_run(tmp_path, "better", steps=9)  # which is finished
        await page.reload()
        await page.locator(".words", has_text="The run failed: learner: no GPU (nobody").wait_for()
        await page.goto(f"{url}/#/")
        await page.locator(".runs tbody tr", has_text="failed learner: no GPU").wait_for()
        names = page.locator(".runs tbody th")
        for column, order in (("step", ["better", "silent"]), ("state", ["silent", "better"])):
            await page.get_by_role("button", name=column).click()
            assert await names.all_inner_texts() == order


@pytest.mark.nats
async def test_a_page_that_is_cut_off_says_that_the_run_is_not_known_and_since_when(
    bus: Bus, server: NatsServer, tmp_path: Path
):
    run = make_run(tmp_path, "test", steps=3)
    write_json(run.path / "progress.json", {"stage": "rl", "step": 3, "policy_version": 4})
    await answer(bus)
    async with faulty_link(server.port) as link, speaking(bus, storage(), learner(), actor()):
        where = RunConfig(run="test", bus=BusConfig(url=f"nats://{HOST}:{link.port}"))
        with (run.path / "lock").open("w"):  # held by this process: the run goes on
            async with served(OpenRuns(tmp_path, lambda run: where)) as url, opened(url) as page:
                await page.goto(f"{url}/#/runs/test")
                await page.locator(".place.works", has_text="Learner").wait_for()
                link.flows.clear()
                words = page.locator(".words", has_text="How the run is now is not known (")
                await words.wait_for()
                last = r"; the run answered last at \d\d:\d\d:\d\d \(.* s\)\)\. Its last metrics came "
                assert re.search(f"no answer.*{last}", await words.inner_text())
                assert await page.locator(".place").count() == 0, "no part is told as it was"
                await check(page)
                link.flows.set()
                await page.locator(".place.works", has_text="Learner").wait_for()


CAUSES = {
    "a slow engine": (
        [actor(running=30, waiting=90, generated_tokens_per_s=12.0, policy_version=26)],
        "engines run 30 requests and 90 more queue, at 12 tokens/s (0.4 each)",
    ),
    "a slow reward": (
        [actor(running=0, waiting=0, rewards_running=64, rewards_longest_s=25.0, reward_s=30.0)],
        "64 rewards run, the longest for 25.0 s; before, one took 30.0 s",
    ),
    "a bus that stores nothing": (
        [actor(not_storing=("TRAJECTORIES",))],
        "says: the bus stores nothing on TRAJECTORIES: free its disk if that is full, and restart",
    ),
    "a full disk": ([actor()], "the learner waits for the groups of step 27: the disk of "),
}


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.nats
@pytest.mark.parametrize("cause", CAUSES)
async def test_the_page_says_at_once_why_the_learner_waits(
    bus: Bus, server: NatsServer, tmp_path: Path, cause: str, monkeypatch: pytest.MonkeyPatch
):
    statuses, words = CAUSES[cause]
    if cause == "a full disk":
        monkeypatch.setattr(run_status, "lack_of_room", lambda where: f"the disk of {where} is full")
    await answer(bus)
    await bus.put("policy", manifest(27, trains_from=1))
    for step in (25, 26):
        event = metrics(step, time_s=1000.0 + 3 * step)
        await Publisher(bus).publish(bus.subject("events", "metrics"), encode(event), message_id=f"m{step}")
    where = RunConfig(run="test", bus=BusConfig(url=server.url))
    waiting = learner(doing="waiting for the batch", wait="batch", step=26)
    make_run(tmp_path, "test", steps=26)
    async with (
        running(lambda stop: speak(bus, stop, storage(), waiting, *statuses)),
        served(OpenRuns(tmp_path, lambda run: where)) as url,
        opened(url) as page,
    ):
        await page.goto(f"{url}/#/runs/test")
        await page.locator(".words", has_text=words).wait_for(timeout=1000 * LONGEST_S)
        await page.locator(".place.waits", has_text="Learner").wait_for()
        if cause == "a slow engine":
            await check(page)
            await page.screenshot(path=picture("dashboard_live", tmp_path))


async def speak(bus: Bus, stop: asyncio.Event, *statuses: Status) -> None:
    """Send these statuses as their processes would, until `stop`."""
    while not stop.is_set():
        for status in statuses:
            await bus.notify(bus.subject("status", status.role), status)
        await asyncio.sleep(0.2)
