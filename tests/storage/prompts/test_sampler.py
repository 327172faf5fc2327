"""A sampler of the user's own: what it is told, that a restart draws the same, and what is refused."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from bus.errors import ConfigError
from bus.messages import Prompt
from storage.ledger.ledger import Ledger
from storage.prompts import data_sets, sampler
from storage.prompts.data_sets import DataSets, PastPrompts
from storage.prompts.sampler import Draw, PickedPrompts, load_sampler
from storage.settings.data import DataConfig, SamplerConfig

PROMPTS = [Prompt(content=f"prompt {n}") for n in range(5)]
HERE = __name__
seen: list[Draw] = []


def by_chance(draw: Draw, *, least: int = 0) -> np.ndarray:
    """Any prompt, and with the state the sum of all that was chosen."""
    seen.append(draw)
    chosen = draw.rng.integers(least, len(draw.prompts), draw.count)
    draw.state["sum"] = draw.state.get("sum", 0) + int(chosen.sum())
    return chosen


def too_few(draw: Draw) -> list[int]:
    return [0] * (draw.count - 1)


def unknown(draw: Draw) -> list[int]:
    return [5] * draw.count


def no_numbers(draw: Draw) -> list[str]:
    return ["0"] * draw.count


def none(draw: Draw) -> None:
    return None


def raises(draw: Draw) -> list[int]:
    return [draw.nothing]


def keeps_a_set(draw: Draw) -> list[int]:
    draw.state["all"] = {1}
    return [0] * draw.count


def stops(draw: Draw) -> list[int]:
    return [next(iter(()))]


replace_prompts = []


def last(draw: Draw) -> list[int]:
    """The last prompt, while somebody else does something."""
    if replace_prompts:
        replace_prompts.pop()()
    return [len(draw.prompts) - 1] * draw.count


def hangs(draw: Draw) -> list[int]:
    return [asyncio.run(asyncio.sleep(3600))]


def hangs_before_it_yields(draw: Draw) -> Iterator[int]:
    yield asyncio.run(asyncio.sleep(3600))


def times_out(draw: Draw) -> list[int]:
    raise TimeoutError("its server is away")


def exits(draw: Draw) -> list[int]:
    raise SystemExit(3)


class Storage:
    def __init__(self, ledger: Ledger, directory: Path, function, prompts, **settings) -> None:
        config = SamplerConfig(function=f"{HERE}:{function.__name__}", settings=settings)
        self.ledger, self.data = ledger, DataSets(ledger, directory)
        self.data.configure(prompts, seed=3, shuffle=True, source="a file", is_picked=True)
        self.picked = PickedPrompts(ledger, self.data, load_sampler(config), seed=3)

    async def issue(self, count: int) -> list[str]:
        await self.picked.extend(count, asyncio.Event())
        leases = self.ledger.issue(min(count, self.picked.left), 0)
        return [str(self.data.prompt(lease).content) for lease in leases]


@contextmanager
def process(directory: Path, function=by_chance, *, prompts=PROMPTS, flush: bool = True, **settings):
    """A storage process; one that does not `flush` is killed."""
    seen.clear()
    with closing(Ledger.open(directory / "ledger.sqlite")) as ledger:
        storage = Storage(ledger, directory, function, prompts, **settings)
        ledger.flush()
        yield storage
        if not flush:
            ledger._pending.clear()


async def test_a_restart_keeps_what_was_drawn_and_draws_what_it_would_have_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(data_sets, "PICKS_OF_FACT", 4)
    (tmp_path / "once").mkdir()
    with process(tmp_path / "once") as storage:
        expected = [*await storage.issue(3), *await storage.issue(6), *await storage.issue(7)]
        states = [draw.state["sum"] for draw in seen]
    chosen = [int(prompt.removeprefix("prompt ")) for prompt in expected]
    assert states == [sum(chosen[:3]), sum(chosen[:9]), sum(chosen)]
    with process(tmp_path) as storage:
        found = await storage.issue(3)
    with process(tmp_path, flush=False) as storage:
        assert await storage.issue(6) == expected[3:9]
    with process(tmp_path) as storage:
        found += await storage.issue(6)
        assert [draw.state["sum"] for draw in seen] == states[1:2]
    with process(tmp_path) as storage:
        found += await storage.issue(7)
        assert [str(storage.data.prompt(n).content) for n in range(16)] == found == expected
        past = PastPrompts(storage.ledger.facts, tmp_path)
        assert [past.of(n).content for n in range(16)] == expected
    assert len(set(expected)) == len(PROMPTS)


async def test_it_is_told_what_is_known_of_each_prompt_also_after_a_restart(tmp_path):
    with process(tmp_path) as storage:
        await storage.issue(2)
        drawn = list(storage.data.picked)
        storage.picked.note(0, [0.0, 1.0])
        storage.picked.note(1, [1.0, 1.0])
        storage.picked.note(1, [])  # nothing is known of it
        storage.data.quarantine(1)
    groups, totals = np.zeros(5, int), np.zeros(5)
    np.add.at(groups, drawn, 1)
    np.add.at(totals, drawn, [0.5, 1.0])
    with process(tmp_path) as storage:
        await storage.issue(1)
        storage.picked.note(2, [0.25])
        await storage.issue(1)
    first, second = seen
    for draw in seen:
        assert [prompt.content for prompt in draw.prompts] == [prompt.content for prompt in PROMPTS]
        assert np.flatnonzero(draw.quarantined).tolist() == [drawn[1]]
    assert first.drawn.tolist() == first.groups.tolist() == groups.tolist()
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(first.reward_mean, totals / groups)
    number = int(np.flatnonzero(second.groups - first.groups)[0])
    assert second.reward_mean[number] == (totals[number] + 0.25) / (groups[number] + 1)


async def test_other_prompts_are_drawn_from_the_next_lease_on(tmp_path):
    with process(tmp_path) as storage:
        old = await storage.issue(4)
        storage.picked.note(0, [1.0])
    with process(tmp_path, prompts=[Prompt(content="new")]) as storage:
        assert await storage.issue(2) == ["new", "new"]
        assert [str(storage.data.prompt(n).content) for n in range(4)] == old
        assert seen[0].groups.tolist() == [0]


async def test_prompts_that_are_replaced_while_the_sampler_chooses_are_not_drawn(tmp_path):
    loop, new = asyncio.get_running_loop(), [Prompt(content="new")]
    with process(tmp_path, last) as storage:
        add = storage.data.add(new, keep_old=False, source="launch data")
        replace_prompts.append(lambda: asyncio.run_coroutine_threadsafe(add, loop).result(60))
        assert await storage.issue(2) == []
        assert await storage.issue(2) == ["new", "new"]


async def test_prompts_are_chosen_as_late_as_can_be(tmp_path):
    with process(tmp_path, least=4) as storage:
        await storage.picked.extend(3, asyncio.Event())
        storage.ledger.issue(1, 0)
        assert await storage.issue(5) == ["prompt 4"] * 5
        assert [draw.count for draw in seen] == [3, 3]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (too_few, r"too_few' returned 1 prompts, where draw\.count=2 are wanted"),
        (unknown, "unknown' returned 5, and prompts are numbered from 0 to 4"),
        (no_numbers, "return the indices of prompts"),
        (none, "returned None: return the indices"),
        (raises, r"(?s)raises' raised AttributeError.*test_sampler\.py.*in raises"),
        (stops, r"(?s)stops' raised .*StopIteration.*test_sampler\.py.*in stops"),
        (keeps_a_set, r"what is no JSON in draw\.state"),
        (hangs, r"took longer than 0\.01 s"),
        (hangs_before_it_yields, r"took longer than 0\.01 s"),
        (times_out, r"(?s)times_out' raised TimeoutError\('its server is away'\)"),
        (exits, r"exits' raised .*SystemExit\(3\)"),
    ],
)
async def test_what_a_sampler_must_not_do_ends_the_run_with_its_name(tmp_path, monkeypatch, function, said):
    monkeypatch.setattr(sampler, "CHOOSING_S", 0.01 if "hangs" in function.__name__ else 60.0)
    with process(tmp_path, function) as storage:
        with pytest.raises(ConfigError, match=said):
            await storage.issue(2)
        assert storage.picked.left == 0


def test_names_signatures_and_mixtures_are_refused_at_the_start():
    assert load_sampler(SamplerConfig()) is None
    with pytest.raises(ConfigError, match=r"gets a Draw and data\.sampler\.settings: .*'most'"):
        load_sampler(SamplerConfig(function=f"{HERE}:by_chance", settings={"most": 1}))
    with pytest.raises(ConfigError, match="did you mean 'too_few'"):
        load_sampler(SamplerConfig(function=f"{HERE}:too_fwe"))
    with pytest.raises(ValidationError, match="chooses among the prompts of one file"):
        DataConfig(prompts="my_rows:numbers", sampler={"function": f"{HERE}:by_chance"})
