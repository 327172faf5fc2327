"""Programs against tests in the sandbox: what passes, what cheats, and what is nobody's fault."""

import asyncio
import json

import psutil
import pytest

from actors.rewards.base import RewardError
from actors.rewards.code.reward import CodeTests
from actors.rewards.scoring.scorers import Scorer
from actors.sandboxes.sandbox import Sandbox
from actors.settings.rewards import RewardConfig
from tests.actors.rewards.answers import answer
from tests.actors.rewards.cheating_programs import ADD, DOUBLE, WHEN_CALLED, WHEN_READING

DOUBLED = {"inputs": ["3\n", "4\n", "-5\n"], "outputs": ["6\n", "8", "-10\n"]}
SUMS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(-1, 1) == 0"]
CHECKED = {
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n",
    "entry_point": "add",
}


def rewards(**settings):
    return CodeTests(RewardConfig.model_validate({"reward": "code", "code": settings}))


@pytest.fixture(scope="module")
def shared():
    """Rewards by credit; the sandboxes end with the module."""
    limits = {"wall_s": 5.0, "memory_mb": 256, "at_once": 8}
    found = {credit: rewards(credit=credit, **limits) for credit in ("all", "share")}
    yield found
    for one in found.values():
        asyncio.run(one.close())


@pytest.fixture
def score(shared):
    async def scored(text, tests, credit="share", **more):
        return await shared[credit](answer(text, None, metadata={"tests": tests, **more}))

    return scored


@pytest.fixture
async def hasty():
    reward = rewards(credit="share", wall_s=0.4, total_s=0.4)
    yield reward
    await reward.close()


FOREVER = "while True: pass"
NODE = "class Node:\n  def __init__(self, v): self.v, self.left = v, None\n"
DEPTH = NODE + "def depth(n): return 1 + depth(n.left) if n else 0"
TREE = "root = Node(1)\nroot.left = Node(2)"
PLAIN = "{1: (None, {2}), 'z': b'1', 3.5: 1j, True: -0.5}"
RAISES = "try:\n    f(1)\nexcept ValueError as error:\n    assert str(error) == 'no'"
THREAD = "import threading\nthreading.Thread(target=lambda: print(int(input()) * 2)).start()"
METHOD = "class Solution:\n  def add(self, a, b): return a, b"
FUNCTIONAL = {"testtype": "functional", "fn_name": "add"}
FORGOTTEN = "assert math.isclose(add(0.1, 0.2), 0.3)"  # the test has forgotten to import it
SETUP = {"test_imports": ["import os"], "test_setup_code": "One = 1"}
RIGHT = {
    "an input": (DOUBLE, DOUBLED),
    "an input as JSON": (DOUBLE, json.dumps(DOUBLED)),
    "an output of another form": (DOUBLE, [{"input": "1", "output": " 2.0 \n\n", "testtype": "stdin"}]),
    "lines": ("print(input())\nprint('a  b')", {"inputs": [["x"]], "outputs": [["x", "a b"]]}),
    "a thread": (THREAD, DOUBLED),
    "assertions": (ADD, SUMS),
    "a check": (ADD, CHECKED),
    "a module that is not imported": (ADD, {"test_list": [FORGOTTEN]}),
    "a setup": (ADD, {"test_list": ["assert add(One, 1) == 2"], **SETUP}),
    "calls": (ADD, {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]}),
    "calls of a method": (METHOD, [{"input": "1\n[2]", "output": "[1, [2]]", **FUNCTIONAL}]),
    "the name of a built-in function": (
        "def sum(a, b): return a * b",
        {"test_list": ["assert sum(3, 5) == 15"], "entry_point": "sum"},
    ),
    "a change in place": ("def f(x): x.sort()", ["a = [3, 1]\nf(a)\nassert a == [1, 3]"]),
    "plain data": (f"def f(x): return {PLAIN}", [f"assert f(None) == {PLAIN}"]),
    "a generator": ("def f(n):\n  yield from range(n)", ["assert list(f(3)) == [0, 1, 2]"]),
    "an exception": ("def f(n): raise ValueError('no')", [RAISES]),
    "a class": (DEPTH, {"test_setup_code": TREE, "test_list": ["assert depth(root) == root.left.v == 2"]}),
    "a dict of another class": (
        "import collections\ndef f(x): return collections.Counter(x)",
        ["assert f('aab') == {'a': 2, 'b': 1}"],
    ),
    "a number of many digits": ("def f(): return 10 ** 5000", ["assert f() == 10 ** 5000"]),
}


@pytest.mark.parametrize("what", RIGHT)
async def test_a_right_program_passes_all_its_tests(score, what):
    program, tests = RIGHT[what]
    assert await score(program, tests) == 1.0
    text = f"So:\n```python\nno program\n```\nOr rather:\n```python\n{program}\n```\nDone."
    assert await score(text, tests) == 1.0


async def test_a_program_that_passes_some_tests_gets_their_share_or_nothing(score):
    partly = "n = int(input())\nprint(n * 2 if n > 0 else n)"
    assert await score(partly, DOUBLED) == pytest.approx(2 / 3)
    assert await score(partly, DOUBLED, "all") == 0.0
    assert await score(DOUBLE, DOUBLED, "all") == 1.0
    ints = "def add(a, b):\n    return int(a) + int(b)"
    assert await score(ints, SUMS) == pytest.approx(2 / 3)
    assert await score(ints, SUMS, "all") == 0.0
    assert await score(ADD, SUMS, "all") == 1.0


@pytest.mark.parametrize("what", WHEN_READING)
async def test_what_a_program_does_when_it_reads_and_prints_is_its_own_fault(score, what):
    assert await score(WHEN_READING[what], DOUBLED) == 0.0


@pytest.mark.parametrize("what", WHEN_CALLED)
async def test_what_a_program_does_when_it_is_called_is_its_own_fault(score, what):
    assert await score(WHEN_CALLED[what], SUMS) == 0.0
    assert await score(WHEN_CALLED[what], CHECKED) == 0.0


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize(
    "program", ["while True: pass", "def add(a, b):\n  while True: pass\ninput = add\nadd(1, 2)"]
)
@pytest.mark.parametrize("tests", [DOUBLED, SUMS, CHECKED])
async def test_a_program_that_takes_forever_passes_nothing(hasty, program, tests):
    assert await hasty(answer(program, None, metadata={"tests": tests})) == 0.0


async def test_a_program_that_takes_forever_keeps_what_it_has_passed(hasty):
    hangs = "def add(a, b):\n    while a == 'a': pass\n    return a + b"
    assert await hasty(answer(hangs, None, metadata={"tests": SUMS})) == pytest.approx(1 / 3)


async def test_a_program_cannot_put_its_own_names_into_the_tests(score):
    program = "def f(x): return 99\ndef abs(x): return 0\nclass math:\n  isclose = lambda *a: True"
    assert await score(program, ["assert abs(f(1) - 1.5) < 1e-6", "assert math.isclose(f(1), 1.5)"]) == 0.0
    own = "def same(a, b):\n    return a == b\ndef check(candidate):\n    assert same(candidate(1), 1)\n"
    program = "def f(x): return 99\ndef same(a, b): return True\ndef check(c): pass\ncandidate = lambda x: 1"
    assert await score(program, {"test": own, "entry_point": "f"}) == 0.0


async def test_tests_that_print_say_nothing_by_it(score):
    tests = ["print('true')\nassert add(1, 2) == 4", "import sys\nsys.exit(0) or add"]
    with pytest.raises(RewardError, match="asserts nothing"):
        await score(ADD, tests)
    assert await score(ADD, [tests[0], "import sys\nsys.exit(0)\nassert add(1, 2) == 3"]) == 0.0


async def test_tests_that_take_too_long_together_end_and_the_rest_are_not_passed():
    reward = rewards(credit="share", wall_s=60, total_s=4.0)
    try:
        slow = "import time\nn = int(input())\ntime.sleep(4 * (n == 4))\nprint(n * 2)"
        assert await reward(answer(slow, None, metadata={"tests": DOUBLED})) == pytest.approx(2 / 3)
    finally:
        await reward.close()


async def test_calls_have_a_limit_each_and_are_bounded_together_by_that_of_all_tests():
    reward = rewards(credit="share", wall_s=3.0, total_s=60)
    slow = "import time\ndef f(n):\n    time.sleep(0.3 if n < 3 else 99)\n    return n"
    tests = [f"assert f({n}) == {n}" for n in range(5)]  # the fourth takes too long, and the program is gone
    try:
        async with asyncio.timeout(30):
            assert await reward(answer(slow, None, metadata={"tests": tests})) == pytest.approx(3 / 5)
    finally:
        await reward.close()


@pytest.mark.parametrize("tests_begin_late", [False, True])
async def test_calls_that_use_up_the_time_of_all_tests_leave_none_for_inputs(monkeypatch, tests_begin_late):
    begin = Sandbox._run

    async def begin_late(self, code, stdin, limit, limits, **more):
        if "stop" not in more and "peer" in more:
            await asyncio.sleep(0.2)
        return await begin(self, code, stdin, limit, limits, **more)

    if tests_begin_late:  # as on a busy host: the program's time is up while the tests have some left
        monkeypatch.setattr(Sandbox, "_run", begin_late)
    reward = rewards(credit="share", wall_s=60, total_s=4.0)
    program = (
        "import time\ndef f(n):\n    time.sleep(99 * n)\n    return n\n"
        "if __name__ == '__main__':\n    print(int(input()) * 2)"
    )
    called = {"testtype": "functional", "fn_name": "f"}
    tests = [{"input": n, "output": n, **called} for n in "01"] + [{"input": "3", "output": "6"}]
    try:
        async with asyncio.timeout(30):
            assert await reward(answer(program, None, metadata={"tests": tests})) == pytest.approx(1 / 3)
            assert await reward(answer(program, None, metadata={"tests": tests[::2]})) == 1.0
    finally:
        await reward.close()


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (["assert add(len, 1)"], "its tests are wrong: NotImplementedError: a test gives the program <b"),
        (["import no_such_module\nassert add(1, 2) == 3"], "its tests are wrong: ModuleNotFoundError"),
        ({"test_list": SUMS, "test_setup_code": "1 / 0"}, "its tests are wrong: ZeroDivisionError"),
        ({"test_list": ["import os\nassert os._exit(3)"]}, "its tests ended with status 3"),
        ({"inputs": ["1"], "outputs": []}, r"1 inputs and 0 outputs"),
    ],
)  # fmt: skip
async def test_tests_that_are_wrong_fail_the_rollout_with_the_name_of_its_prompt(score, tests, why):
    with pytest.raises(RewardError, match=f"task t: .*{why}"):
        await score(ADD, tests)


async def until_running(reward, count):
    """Return the programs of the sandbox once there are so many that have nothing open but their streams."""
    server = psutil.Process(reward._sandbox._server.process.pid)
    async with asyncio.timeout(60):
        while True:
            found = [p for p in server.children(recursive=True) if p.ppid() != server.pid]
            if len(found) == count and all(p.num_fds() <= 5 for p in found):
                return found
            await asyncio.sleep(0.01)


@pytest.fixture
async def patient():
    reward = rewards(wall_s=60)
    yield reward
    await reward.close()


async def test_a_program_that_the_host_kills_has_no_reward(patient):
    asked = patient(answer("import time\ntime.sleep(99)", None, metadata={"tests": DOUBLED}))
    task = asyncio.create_task(asked)
    [program] = await until_running(patient, 1)
    program.kill()
    with pytest.raises(RewardError, match=r"task t: its tests could not be run: .*killed by its host"):
        await task


@pytest.mark.parametrize("which", [0, 1])
async def test_a_called_program_or_tests_that_the_host_kills_have_no_reward(patient, which):
    asked = patient(answer("import time\ntime.sleep(99)", None, metadata={"tests": SUMS}))
    task = asyncio.create_task(asked)
    found = await until_running(patient, 2)
    found[which].kill()
    with pytest.raises(RewardError, match=r"task t: its tests could not be run: .*killed by its host"):
        await task


async def test_a_sandbox_that_dies_fails_the_rollout_and_serves_the_next(patient):
    asked = patient(answer("import time\ntime.sleep(99)", None, metadata={"tests": DOUBLED}))
    task = asyncio.create_task(asked)
    [program] = await until_running(patient, 1)
    patient._sandbox._server.process.kill()
    program.parent().kill()
    with pytest.raises(RewardError, match="task t: its tests could not be run: the sandbox failed"):
        await task
    await asyncio.to_thread(patient._sandbox._server.process.wait, 10)
    assert await patient(answer(DOUBLE, None, metadata={"tests": DOUBLED})) == 1.0


async def test_it_is_a_reward_by_name_with_the_tests_as_metadata_or_label():
    scorer = Scorer.from_config("code", RewardConfig(reward="code"))
    try:
        assert await scorer.score(answer(DOUBLE, json.dumps(DOUBLED))) == 1.0
        assert await scorer.score(answer(DOUBLE, "no JSON", metadata={"tests": DOUBLED})) == 1.0
        with pytest.raises(RewardError, match="task t: its tests are 6: give"):
            await scorer.score(answer(DOUBLE, "6"))
    finally:
        await scorer.close()


@pytest.mark.slow
async def test_many_answers_are_scored_at_a_time_and_the_event_loop_goes_on():
    reward = rewards(at_once=2, wall_s=30)
    wait = f"import time\ntime.sleep(0.2)\n{DOUBLE}"
    tests = {"inputs": ["1"], "outputs": ["2"]}
    try:
        tasks = [asyncio.create_task(reward(answer(wait, None, metadata={"tests": tests}))) for _ in range(4)]
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert len(pending) >= 2  # no more than two run at a time
        assert await asyncio.gather(*tasks) == [1.0] * 4
    finally:
        await reward.close()
