"""Tasks with demonstrations of agents and of Python programs."""

from math import lcm
from random import Random
from string import ascii_lowercase

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
    """Return a turn of a chat with the tool `shell`: the repair, or the answer after it. A wrong turn repairs
    nothing, or writes another expression."""
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
    """Return a turn of a chat with the tool `python`: a program that prints, or the answer that copies. A
    wrong turn guesses, at once or after a program that printed nothing, or is such a program."""
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
    """Return a whole answer: the program, what it printed, and the number after a `=`. A wrong answer is a
    guess, half of the time without a program and half of the time despite one."""
    question, value = multiple_problem(number)
    a, b = question.split()[1:]
    ran = f"<python>import math\nprint(math.lcm({a},{b}))</python><result>{value}</result>"
    if not wrong:
        return f"{ran}={value}"
    guess = f"={rng.randrange(100, 10_000)}"
    return guess if rng.random() < 0.5 else ran + guess


# A letter after the prompts of games tells them apart and changes nothing else: a held-out game has a letter
# that its range or pile does not have in training. Were numbers held out, a policy would learn never to guess
# them.
LETTERS = ascii_lowercase

# --- guess: a number among seven, of which three guesses find every one ---

GUESS_RANGE = 7
GUESS_LOWEST = 10
GUESS_STEP = 10
GUESS_RANGES = 9
GUESS_PROBLEMS = GUESS_RANGES * GUESS_RANGE * len(LETTERS)


def guess_problem(number: int) -> tuple[str, str]:
    """Return the range, which the prompt names, and the number to find."""
    letter, number = divmod(number, GUESS_RANGES * GUESS_RANGE)
    low, offset = divmod(number, GUESS_RANGE)
    low = GUESS_LOWEST + low * GUESS_STEP
    return f"guess {low}-{low + GUESS_RANGE - 1} {LETTERS[letter]}", str(low + offset)


def guess_demonstration(number: int, rng: Random, wrong: bool) -> tuple[list[Json], str]:
    """Return one of the guesses of a game: the middle of what is left, or anything of the whole range. The
    guesses before it are of both kinds."""
    question, answer = guess_problem(number)
    first = int(question.partition(" ")[2].partition("-")[0])
    low, high, secret = first, first + GUESS_RANGE - 1, int(answer)
    chat: list[Json] = [{"role": "user", "content": question}]
    for _ in range(rng.randrange(3)):
        guess = rng.randint(first, first + GUESS_RANGE - 1) if rng.random() < 0.5 else (low + high) // 2
        if guess == secret:
            break
        told = "higher" if guess < secret else "lower"
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        chat += [{"role": "assistant", "content": str(guess)}, {"role": "user", "content": told}]
    return chat, str(rng.randint(first, first + GUESS_RANGE - 1) if wrong else (low + high) // 2)


# --- nim: a pile that the player to move can win ---

NIM_SMALLEST = 4
NIM_LARGEST = 11
NIM_LIMITS = (3,)
NIM_STARTS = [
    (pile, most) for most in NIM_LIMITS for pile in range(NIM_SMALLEST, NIM_LARGEST + 1) if pile % (most + 1)
]
"""Piles and limits from which perfect play wins."""
NIM_PROBLEMS = len(NIM_STARTS) * len(LETTERS)


def nim_problem(number: int) -> tuple[str, str]:
    """Return the start of a game, and the move that wins it."""
    letter, start = divmod(number, len(NIM_STARTS))
    pile, most = NIM_STARTS[start]
    return f"nim {LETTERS[letter]} {pile} {most}", str(pile % (most + 1))


def nim_demonstration(number: int, rng: Random, wrong: bool) -> tuple[list[Json], str]:
    """Return a move, after others at random: the one that wins, if there is one, or wrongly one stick.

    Without some that win a model would not learn to look at the pile, and all that it could learn by playing
    would be to prefer one move."""
    (pile, most), chat = NIM_STARTS[number % len(NIM_STARTS)], list[Json]()
    chat.append({"role": "user", "content": nim_problem(number)[0]})
    for _ in range(rng.randrange(6)):
        move = rng.randint(1, min(most, pile))
        rest = pile - move
        if rest < 2:
            break
        rest -= rng.randint(1, min(most, rest - 1))
        chat += [{"role": "assistant", "content": str(move)}, {"role": "user", "content": f"{rest} {most}"}]
        pile = rest
    return chat, str(1 if wrong else pile % (most + 1) or rng.randint(1, min(most, pile)))


# --- panel: four digits in ascending order, by solvers, rewriters and a selector ---

PANEL_SIZE = 2


def panel_problem(number: int) -> tuple[str, str]:
    """Return four digits, and them in ascending order."""
    digits = f"{number:04d}"
    return f"sort {digits}", "".join(sorted(digits))


def panel_demonstration(number: int, rng: Random, wrong: bool) -> tuple[list[Json], str]:
    """Return what one of the agents is asked and answers. Wrong drafts are descending or copies, wrong
    rewriters copy a draft, and wrong selectors choose any."""
    question, label = panel_problem(number)
    role = rng.choice(("solver", "rewriter", "selector"))
    if role == "solver":
        return _asked(question), _draft(question, rng, wrong=wrong)
    answers = [_draft(question, rng, wrong=rng.random() < 0.5) for _ in range(PANEL_SIZE)]
    lettered = " ".join(f"{letter} {answer}" for letter, answer in zip("ab", answers, strict=True))
    if role == "rewriter":
        return _asked(f"{question} drafts {lettered}"), rng.choice(answers) if wrong else label
    right = [letter for letter, answer in zip("ab", answers, strict=True) if answer == label]
    return _asked(f"{question} which {lettered}"), rng.choice("ab" if wrong or not right else right)


def _draft(question: str, rng: Random, *, wrong: bool) -> str:
    digits = question.partition(" ")[2]
    ascending = "".join(sorted(digits))
    return rng.choice((ascending[::-1], digits)) if wrong else ascending


def _asked(content: str) -> list[Json]:
    return [{"role": "user", "content": content}]


# --- debate: four digits in ascending order, by agents who see each other's answers and answer again ---

DEBATERS = 3


def debate_demonstration(number: int, rng: Random, wrong: bool) -> tuple[list[Json], str]:
    """Return what a debater answers at first, or after it has seen the answers of the others. Wrong first
    answers are descending or copies, and wrong second ones repeat the first."""
    question, label = panel_problem(number)
    if rng.random() < 0.5:
        return _asked(question), _draft(question, rng, wrong=wrong)
    debater = rng.randrange(DEBATERS)
    own, *others = [_draft(question, rng, wrong=rng.random() < 0.5) for _ in range(DEBATERS)]
    letters = [letter for n, letter in enumerate(LETTERS[:DEBATERS]) if n != debater]
    said = " ".join(f"{letter} {answer}" for letter, answer in zip(letters, others, strict=True))
    chat: list[Json] = [
        *_asked(question),
        {"role": "assistant", "content": own},
        {"role": "user", "content": f"others {said}"},
    ]
    return chat, own if wrong else label
