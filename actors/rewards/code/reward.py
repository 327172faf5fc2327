"""Reward of programs: the tests that come with a prompt, run in a sandbox."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path

from actors.episodes.errors import ToolError
from actors.episodes.task import Answer
from actors.rewards.answer_faults import HostFaultError, verified
from actors.rewards.base import RewardError
from actors.rewards.code.given_tests import BadTestsError, GivenTests, InputTest, read_tests
from actors.rewards.final_text import without_reasoning
from actors.sandboxes.sandbox import Ran, configured_sandbox
from actors.settings.rewards import RewardConfig

SPARE_BYTES = 1 << 16
"""Output beyond the expected one after which a program is ended: it is wrong already."""
LONGEST_REASON = 300
IDLE_PROGRAM = "pass"
"""Program that fails every test, and breaks none."""
_FENCE = re.compile(r"(`{3,})[^`]*+|(~{3,}).*+")
LONGEST_NUMBER = 100
"""Characters of a number that is compared by its value."""


class BrokenTestsError(Exception):
    """The tests did not end as tests do."""


class CodeTests:
    """Runs the program of an answer against its prompt's tests.

    What the program does is its own fault and fails tests: to take too long, to raise, to end early. What a
    test expects is compared where the program has no access: its output by the actor, and what its functions
    return in a sandbox of its own. What the sandbox or a test itself breaks, also for a program that does
    nothing, is a RewardError, never a 0."""

    def __init__(self, config: RewardConfig) -> None:
        """Start the sandbox's process. Raises ConfigError where the host allows none."""
        self._config = config.code
        self._sandbox = configured_sandbox(config.code)

    async def __call__(self, answer: Answer) -> float:
        """Score 1 if all tests pass and else 0, or the share that passes. Raises RewardError."""
        try:
            tests = await asyncio.to_thread(read_tests, answer.metadata, answer.label)
        except BadTestsError as error:
            raise RewardError(f"task {answer.task_id}: {error}") from error

        async def share(program: str) -> float:
            try:
                return await self._passed(program, tests) / len(tests)
            except ToolError as error:
                raise HostFaultError(f"task {answer.task_id}: its tests could not be run: {error}") from error

        found = await verified(
            share,
            program_in(answer.text),
            control=IDLE_PROGRAM,
            lowest=0.0,
            where=f"task {answer.task_id}: the run of its tests",
        )
        return found if self._config.credit == "share" else float(found == 1)

    async def close(self) -> None:
        await self._sandbox.close()

    async def _passed(self, program: str, tests: GivenTests) -> int:
        """Return how many tests pass, of those up to the first that fails where all must pass. Raises
        ToolError and BrokenTestsError."""
        if not program.strip():
            return 0
        called = len(tests.calls) + len(tests.statements)
        passed, took_s = await self._called(program, tests) if called else (0, 0.0)
        if passed < called and self._config.credit == "all":
            return passed
        return passed + await self._read(program, tests.inputs, self._config.total_s - took_s)

    async def _read(self, program: str, tests: Sequence[InputTest], left_s: float) -> int:
        """Return how many outputs are right, of those programs that begin within so many seconds."""
        passed = 0
        for test in tests:
            if left_s <= 0:
                break
            limit = len(test.stdout.encode()) + SPARE_BYTES
            ran = await self._sandbox.run(program, test.stdin, output_bytes=limit)
            is_right = await asyncio.to_thread(_is_right, ran, test)
            passed, left_s = passed + is_right, left_s - ran.took_s
            if self._config.credit == "all" and not is_right:
                break
        return passed

    async def _called(self, program: str, tests: GivenTests) -> tuple[int, float]:
        """Return how many calls and statements pass, and the seconds that took."""
        given = {
            "setup": tests.setup,
            "statements": tests.statements,
            "calls": [asdict(call) for call in tests.calls],
            "entry": tests.entry,
            "call_s": self._config.wall_s,
        }
        ours = f"{_harness()}\nrun_tests()\n"
        theirs = f"{_harness()}\nserve_program({program!r})\n"
        stdin, total_s = json.dumps(given), self._config.total_s
        ran, program_ran = await self._sandbox.run_joined(ours, theirs, stdin, wall_s=total_s)
        results = [json.loads(line) for line in ran.stdout.splitlines()]
        for result in results:
            if isinstance(result, dict):
                raise BrokenTestsError(f"its tests are wrong: {result['broken']}")
        if ran.end == "exited" and ran.status != 0:
            said = ran.stderr[-LONGEST_REASON:]
            raise BrokenTestsError(f"its tests ended with status {ran.status}: {said!r}")
        # Tests and program begin one after the other: one may have used up its time, and the other not.
        is_over = "time" in (ran.end, program_ran.end)
        return sum(results), total_s if is_over else ran.took_s


def _is_right(ran: Ran, test: InputTest) -> bool:
    return (ran.end, ran.status) == ("exited", 0) and same_output(ran.stdout, test.stdout)


@cache
def _harness() -> str:
    return Path(__file__).with_name("in_sandbox.py").read_text()


def program_in(text: str) -> str:
    """Return the last fenced block of code after the reasoning, or all that follows the reasoning."""
    rest = without_reasoning(text)
    found, lines, fence = None, list[str](), ""
    for line in rest.split("\n"):
        mark = line.strip()
        if not fence:
            opens = _FENCE.fullmatch(mark)
            fence, lines = (opens[1] or opens[2], []) if opens else ("", lines)
        elif mark.startswith(fence) and not mark.strip(fence[0]):
            found, fence = lines, ""
        else:
            lines.append(line)
    return rest if found is None else "\n".join(found)


def same_output(found: str, wanted: str) -> bool:
    """Return whether two outputs are equal line by line, but for spaces around words and blank last lines.
    Numbers are equal by value, as in LiveCodeBench (arXiv:2403.07974): 1.0 is 1."""
    ours, theirs = (text.rstrip().split("\n") for text in (found, wanted))
    if len(ours) != len(theirs):
        return False
    return all(map(_same_line, ours, theirs))


def _same_line(found: str, wanted: str) -> bool:
    ours, theirs = found.split(), wanted.split()
    return ours == theirs or (len(ours) == len(theirs) and all(map(_same_word, ours, theirs)))


def _same_word(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    if max(len(found), len(wanted)) > LONGEST_NUMBER:
        return False
    try:
        return Decimal(found) == Decimal(wanted)
    except InvalidOperation:
        return False
