"""Problems and noisy demonstrations of policies that write Python, as calls of a tool or within an answer."""

from math import lcm
from random import Random

from bus.codec import Json

SMALLEST, LARGEST = 11, 99
PER_NUMBER = LARGEST - SMALLEST + 1

# --- python: a power's remainder, which takes a program that prints it ---

MODULI = range(101, 1000)
POWER_PROBLEMS = PER_NUMBER**2 * len(MODULI)
SILENT = "[no output]"
"""What the tool answers for a program that printed nothing."""


def power_problem(number: int) -> tuple[str, str]:
    """Return an expression, and its value."""
    number, modulus = divmod(number, len(MODULI))
    base, exponent = divmod(number, PER_NUMBER)
    base, exponent, modulus = SMALLEST + base, SMALLEST + exponent, MODULI[modulus]
    return f"{base}**{exponent}%{modulus}", str(pow(base, exponent, modulus))


def power_demonstration(number: int, rng: Random, wrong: bool) -> tuple[list[Json], str]:
    """Return a turn of a chat with the tool `python`: a program that prints, or the answer that copies.

    A wrong turn guesses, at once or after a program that printed nothing, or is such a program."""
    question, value = power_problem(number)
    chat: list[Json] = [{"role": "user", "content": question}]
    kind = rng.random()
    if wrong and kind < 0.4:
        return chat, _guess(rng)
    code = f"<python>{question}</python>" if wrong else f"<python>print({question})</python>"
    if kind < (0.8 if wrong else 0.5):
        return chat, code
    result: Json = {"role": "user", "content": f"<result>{SILENT if wrong else value}</result>"}
    return [*chat, {"role": "assistant", "content": code}, result], _guess(rng) if wrong else value


def _guess(rng: Random) -> str:
    return str(rng.choice(MODULI))


# --- retool: a least common multiple, by a program within the answer ---

MULTIPLE_PROBLEMS = PER_NUMBER**2


def multiple_problem(number: int) -> tuple[str, str]:
    """Return two numbers, and their least common multiple."""
    a, b = (SMALLEST + part for part in divmod(number, PER_NUMBER))
    return f"lcm {a} {b}", str(lcm(a, b))


def multiple_demonstration(number: int, rng: Random, wrong: bool) -> str:
    """Return a whole answer: the program, what it printed, and the number after a `=`.

    A wrong answer is a guess, half of the time without a program and half of the time despite one."""
    question, value = multiple_problem(number)
    a, b = question.split()[1:]
    ran = f"<python>import math\nprint(math.lcm({a},{b}))</python><result>{value}</result>"
    if not wrong:
        return f"{ran}={value}"
    guess = f"={rng.randrange(100, 10_000)}"
    return guess if rng.random() < 0.5 else ran + guess
