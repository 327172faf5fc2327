"""Problems and noisy demonstrations of a policy that repairs a tiny repository by the shell of a sandbox."""

from random import Random

from bus.codec import Json

EXPRESSIONS = tuple(f"x{sign}{number}" for sign in "+-" for number in range(1, 10))
REPAIRS = len(EXPRESSIONS) * (len(EXPRESSIONS) - 1)
CHECK = """import os
import subprocess
import sys

os.remove(__file__)  # which tells the answer
proof = sys.stdin.readline().strip()
code = "import sys; sys.path.insert(0, '.'); from f import f; print(*map(f, range(-20, 20)))"
asked = [sys.executable, "-SI", "-c", code]
ran = subprocess.run(asked, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
print(proof if ran.stdout.split() == [str(WANTED) for x in range(-20, 20)] else "wrong")
"""
"""Judges a repository: the function runs in another process than the one that knows what is to be printed."""


def _expressions(number: int) -> tuple[str, str]:
    """Return what the function of a repository computes, and what it is to compute."""
    first, second = divmod(number, len(EXPRESSIONS) - 1)
    return EXPRESSIONS[first], EXPRESSIONS[second + (second >= first)]


def repair_problem(number: int) -> tuple[str, str]:
    """Return what is wrong with a repository, and the right expression."""
    there, wanted = _expressions(number)
    return f"f.py: {there}, want {wanted}", wanted


def repair_files(number: int) -> dict[str, Json]:
    """Return the metadata of a problem: its repository, and the check that the policy does not see."""
    there, wanted = _expressions(number)
    tests = f"from f import f\n\nassert [f(x) for x in range(9)] == [{wanted} for x in range(9)]\n"
    return {
        "sandbox_files": {"f.py": f"def f(x):\n    return {there}\n", "test_f.py": tests},
        "sandbox_check_files": {"/tmp/check.py": CHECK.replace("WANTED", wanted)},
    }


def repair_demonstration(number: int, rng: Random, wrong: bool) -> tuple[list[Json], str]:
    """Return a turn of a chat with the tool `shell`: the repair, or the answer after it.

    A wrong turn repairs nothing, or writes another expression."""
    question, wanted = repair_problem(number)
    there, _ = _expressions(number)
    chat: list[Json] = [{"role": "user", "content": question}]
    kind = rng.random()
    if wrong and kind < 0.4:
        return chat, "done"
    written = rng.choice(EXPRESSIONS) if wrong else wanted
    call = f"<shell>sed -i s/{there}/{written}/ f.py</shell>"
    if kind < (0.8 if wrong else 0.5):
        return chat, call
    result: Json = {"role": "user", "content": "<result>[no output]</result>"}
    return [*chat, {"role": "assistant", "content": call}, result], "done"
