"""Prompts that a function of the user's own yields: in their order, without an end, and across restarts."""

import asyncio
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from bus.errors import BusAwayError, ConfigError
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger import Ledger
from storage.prompts import stream
from storage.prompts.data_sets import DataSets, PastPrompts
from storage.prompts.run_prompts import read_prompts
from storage.prompts.stream import PromptStream
from storage.settings.data import DataConfig

SOURCE = """
import itertools, threading
asked, waiting, going = [], threading.Event(), threading.Event()

def numbers(position):
    asked.append(position)
    return ({"prompt": f"row {n}", "label": n} for n in itertools.count(position))

def ten(position):
    asked.append(position)
    return [{"prompt": f"row {n}"} for n in range(10)][position:]

def slow(position):
    for row in numbers(position):
        if row["label"] == 4:
            waiting.set()
            going.wait()
        yield row

def nothing(position):
    return []

def texts(position):
    yield {"prompt": "good"}
    yield "what is 1 + 1?"

def questions(position):
    yield {"question": "good"}

def broken(position):
    yield {"prompt": str(1 / 0)}

def exits(position):
    yield {"prompt": str(raise_system_exit())}

def raise_system_exit():
    raise SystemExit(3)

def broken_later(position):
    for n in range(position, 6):
        yield {"prompt": f"row {n}"}
    raise KeyError("the server's answer")
"""


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The user's module, whose blocks have four rows."""
    (tmp_path / "my_rows.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(stream, "BLOCK_ROWS", 4)
    import my_rows

    yield my_rows
    my_rows.going.set()
    del sys.modules["my_rows"]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def fits(prompts, source):
    return []


class Storage:
    """What a storage process has of its prompts."""

    def __init__(self, ledger: Ledger, function: str, check) -> None:
        config, run = DataConfig(prompts=f"my_rows:{function}"), RunDirectory(Path("runs"), "mine")
        prompts = read_prompts(config, run, seed=0)
        self.ledger, self.data, self.stop = ledger, DataSets(ledger, run.data), asyncio.Event()
        self.data.configure(
            prompts.training, seed=0, shuffle=True, source=prompts.source, is_stream=config.is_stream
        )
        self.stream = PromptStream(
            ledger, self.data, check, source=config.prompts, keys=config.keys, directory=run.data
        )

    async def issue(self, count: int) -> list[str]:
        """Issue leases as the dispatcher does, which asks again while some are lacking."""
        issued: list[str] = []
        while lacking := count - len(issued):
            await self.stream.extend(lacking, self.stop)
            leases = self.ledger.issue(min(lacking, self.stream.left), 0)
            if not leases:
                break
            issued += [str(self.data.prompt(lease).content) for lease in leases]
        return issued


@contextmanager
def process(function: str, check=fits, *, flush: bool = True):
    """A storage process; one that does not `flush` is killed."""
    with closing(Ledger.open(Path("ledger.sqlite"))) as ledger:
        ledger.flush()
        yield Storage(ledger, function, check)
        if not flush:
            ledger._pending.clear()


def rows(first: int, after: int, of: int = 10**9) -> list[str]:
    return [f"row {n % of}" for n in range(first, after)]


async def test_rows_are_issued_in_their_order_and_a_restart_goes_on_behind_them(source):
    with process("numbers") as storage:
        assert await storage.issue(3) == rows(0, 3)
        assert await storage.issue(7) == rows(3, 10)
    assert source.asked == [0, 4]  # once for the start, and once for all further blocks
    with process("numbers", flush=False) as storage:
        assert await storage.issue(9) == rows(10, 19)
    assert source.asked[2:] == [12]
    with process("numbers") as storage:  # what a kill undid is issued anew
        assert await storage.issue(20) == rows(10, 30)
        past = PastPrompts(storage.ledger.facts, Path("runs/mine/data"))
        assert [past.of(n).content for n in range(30)] == rows(0, 30)


async def test_a_source_that_ends_begins_anew(source):
    with process("ten") as storage:
        assert await storage.issue(3) == rows(0, 3)
        assert await storage.issue(24) == rows(3, 27, of=10)
        assert source.asked == [0, 4, 0, 0]
    with process("ten") as storage:
        assert await storage.issue(5) == rows(27, 32, of=10)


async def test_blocks_that_are_over_hold_no_files():
    with process("numbers") as storage:
        await storage.issue(10)
        before = open_files()
        for first in range(10, 210, 10):
            for lease in list(storage.ledger.rolling_out):
                storage.ledger.store(lease)
            assert await storage.issue(10) == rows(first, first + 10)
        assert open_files() <= before


async def test_a_source_that_waits_is_named_and_a_stop_ends_the_wait(source):
    with process("slow") as storage:
        await storage.stream.extend(6, storage.stop)  # what is there does not wait for what is not
        assert await storage.issue(4) == rows(0, 4)
        issuing = asyncio.create_task(storage.issue(1))
        assert await asyncio.to_thread(source.waiting.wait, 60)
        assert storage.stream.waits_for == "waiting for data.prompts 'my_rows:slow' to yield row 5"
        storage.stop.set()
        assert await issuing == []


async def test_a_block_waits_for_the_bus_and_has_its_long_prompts_skipped():
    away = [True]

    async def check(prompts, source):
        if away.pop() if away else False:
            raise BusAwayError("away")
        return [1]

    with process("numbers", check) as storage:
        assert await storage.issue(6) == rows(0, 4)
        assert await storage.issue(3) == rows(4, 7)
        assert [storage.data.is_quarantined(n) for n in range(7)] == [False] * 5 + [True, False]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nothing", "yields no rows"),
        ("texts", r"'my_rows:texts', row 2: a str, not an object"),
        ("questions", "row 1: no key 'prompt'"),
        ("broken", r"(?s)'my_rows:broken' raised ZeroDivisionError.*my_rows\.py.*in broken"),
        ("exits", r"(?s)'my_rows:exits' raised SystemExit.*my_rows\.py.*in exits"),
        ("brokn", "did you mean 'broken'"),
    ],
)
def test_what_yields_no_prompts_is_refused_at_the_start(function, said):
    with pytest.raises(ConfigError, match=said), process(function):
        pass


async def test_an_error_in_a_later_row_has_its_name_and_its_traceback():
    failure = pytest.raises(ConfigError, match=r"(?s)raised KeyError.*rows from 4 on.*in broken_later")
    with process("broken_later") as storage, failure:
        await storage.issue(8)


async def test_another_function_takes_over_before_the_rows_that_were_read_ahead():
    with process("numbers") as storage:
        assert await storage.issue(2) == rows(0, 2)
    with process("ten") as storage:
        assert await storage.issue(12) == rows(0, 12, of=10)
        past = PastPrompts(storage.ledger.facts, Path("runs/mine/data"))
        assert [past.of(n).content for n in range(14)] == rows(0, 2) + rows(0, 12, of=10)


def test_elsewhere_a_function_ends_or_is_given_with_a_slice(monkeypatch):
    monkeypatch.setattr("storage.prompt_files.rows.MOST_ROWS", 20)
    sources = [{"name": "a", "prompts": "my_rows:numbers@[3:7]"}, {"name": "b", "prompts": "my_rows:ten"}]
    found = read_prompts(DataConfig(sources=sources, heldout="my_rows:ten"), RunDirectory(Path(), "a"), 0)
    assert [prompt.content for prompt in found.training] == [*rows(3, 7), *rows(0, 10)]
    assert len(found.heldout) == 10
    with pytest.raises(ConfigError, match=r"goes on after 20 rows: .*my_rows:numbers@\[:1000\]"):
        read_prompts(
            DataConfig(prompts="my_rows:ten", heldout="my_rows:numbers"), RunDirectory(Path(), "b"), 0
        )
