"""Thirty tiny repositories, each with a fault and with tests that fail by it.

In the code `@right@there@` stands for what is right and what is there."""

import re
from typing import NamedTuple, Self

from bus.codec import Json

FAULT = re.compile("@(.*?)@(.*?)@")
SHOWN = 2
"""Tests of each that the policy sees; the check has further ones."""
CHECK = """import os
import subprocess
import sys

os.remove(__file__)  # which tells the answer
proof = sys.stdin.readline().strip()
code = "import sys; sys.path.insert(0, '.'); from {name} import *\\n" + "\\n".join({asked})
ran = subprocess.run([sys.executable, "-SI", "-c", code], stdout=subprocess.PIPE, text=True,
                     stdin=subprocess.DEVNULL)
print(proof if ran.stdout.splitlines() == {wanted} else "wrong")
"""
"""Judges a repository: its code runs in another process than the one that knows what is to be printed."""
SOURCES = """
def clamp(x, low, high):
    return max(low, min(x, @high@low@))
clamp(2, 1, 3) -> 2
clamp(9, 1, 3) -> 3
clamp(-9, 1, 3) -> 1

def median(xs):
    xs = sorted(xs)
    return xs[len(xs) @//@- 1 -@ 2]
median([1, 9, 5]) -> 5
median([4, 3, 2, 1, 0]) -> 2
median([7]) -> 7

def is_leap(year):
    return year % 4 == 0 and (year % 100 @!=@==@ 0 or year % 400 == 0)
is_leap(2024) -> True
is_leap(1900) -> False
is_leap(2000) -> True
is_leap(2023) -> False

def factorial(n):
    found = 1
    for k in range(2, @n + 1@n@):
        found *= k
    return found
factorial(3) -> 6
factorial(5) -> 120
factorial(0) -> 1

def gcd(a, b):
    while b:
        a, b = b, a @%@//@ b
    return a
gcd(12, 18) -> 6
gcd(21, 14) -> 7
gcd(5, 0) -> 5

def count_vowels(text):
    return sum(letter in 'aeiou' for letter in text@.lower()@@)
count_vowels('Apple') -> 2
count_vowels('IO') -> 2
count_vowels('xyz') -> 0

def is_palindrome(text):
    return text == text@[::-1]@[::1]@
is_palindrome('abc') -> False
is_palindrome('abba') -> True
is_palindrome('ab') -> False

def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, @a + b@b + b@
    return a
fibonacci(7) -> 13
fibonacci(3) -> 2
fibonacci(1) -> 1
fibonacci(0) -> 0

def flatten(rows):
    return [x for row in rows for x in @row@rows@]
flatten([[1, 2], [3]]) -> [1, 2, 3]
flatten([[], [4]]) -> [4]
flatten([]) -> []

def unique(xs):
    return [x for n, x in enumerate(xs) if x not in xs[:@n@n + 1@]]
unique([1, 1, 2]) -> [1, 2]
unique([3, 2, 3]) -> [3, 2]
unique([]) -> []

def chunks(xs, size):
    return [xs[n : n + size] for n in range(0, len(xs), @size@1@)]
chunks([1, 2, 3], 2) -> [[1, 2], [3]]
chunks([1, 2], 2) -> [[1, 2]]
chunks([], 3) -> []

def rotate(xs, by):
    by %= len(xs)
    return xs[by:] + xs[:@by@-by@]
rotate([1, 2, 3], 1) -> [2, 3, 1]
rotate([1, 2, 3, 4], 3) -> [4, 1, 2, 3]
rotate([1, 2], 4) -> [1, 2]

def running_sums(xs):
    found = []
    for x in xs:
        found.append(@x + (found[-1] if found else 0)@x@)
    return found
running_sums([1, 2, 3]) -> [1, 3, 6]
running_sums([5, -5]) -> [5, 0]
running_sums([]) -> []

def second_largest(xs):
    return sorted(set(xs))@[-2]@[1]@
second_largest([1, 5, 3, 4]) -> 4
second_largest([9, 9, 2, 1]) -> 2
second_largest([1, 2]) -> 1

def digits_sum(n):
    return sum(int(digit) for digit in str(@abs(n)@n@))
digits_sum(-12) -> 3
digits_sum(-9) -> 9
digits_sum(305) -> 8

def to_binary(n):
    return bin(n)@[2:]@[1:]@
to_binary(5) -> '101'
to_binary(8) -> '1000'
to_binary(0) -> '0'

def title_case(text):
    return @' '@''@.join(word.capitalize() for word in text.split())
title_case('one two') -> 'One Two'
title_case('a  b') -> 'A B'
title_case('') -> ''

def word_counts(text):
    found = {}
    for word in text.split():
        found[word] = found.get(word, @0@1@) + 1
    return found
word_counts('a b a') -> {'a': 2, 'b': 1}
word_counts('x') -> {'x': 1}
word_counts('') -> {}

def is_sorted(xs):
    return all(a @<=@<@ b for a, b in zip(xs, xs[1:]))
is_sorted([1, 1, 2]) -> True
is_sorted([4, 4]) -> True
is_sorted([2, 1]) -> False
is_sorted([]) -> True

def binary_search(xs, x):
    low, high = 0, len(xs)
    while low < high:
        middle = (low + high) // 2
        if xs[middle] < x:
            low = middle + @1@2@
        else:
            high = middle
    return low
binary_search([1, 3, 5], 5) -> 2
binary_search([1, 3, 5], 4) -> 2
binary_search([1, 3, 5], 0) -> 0

def transpose(rows):
    return [list(column) for column in zip(@*rows@rows@)]
transpose([[1, 2], [3, 4]]) -> [[1, 3], [2, 4]]
transpose([[1], [2]]) -> [[1, 2]]
transpose([]) -> []

def dot(xs, ys):
    return sum(x @*@+@ y for x, y in zip(xs, ys))
dot([1, 2], [3, 4]) -> 11
dot([2], [5]) -> 10
dot([], []) -> 0

def average(xs):
    return sum(xs) / len(xs) if xs else @0.0@None@
average([]) -> 0.0
average(()) -> 0.0
average([1, 2]) -> 1.5

def caesar(text, by):
    return ''.join(chr((ord(letter) - 97 + by) % @26@25@ + 97) for letter in text)
caesar('xyz', 3) -> 'abc'
caesar('z', 1) -> 'a'
caesar('abc', 0) -> 'abc'

def seconds(clock):
    hours, minutes = map(int, clock.split(':'))
    return @hours * 3600@hours * 60@ + minutes * 60
seconds('01:00') -> 3600
seconds('10:30') -> 37800
seconds('00:05') -> 300

def common_prefix(one, other):
    length = 0
    for a, b in zip(one, other):
        if a != b:
            @break@continue@
        length += 1
    return one[:length]
common_prefix('abcd', 'abxd') -> 'ab'
common_prefix('xa', 'ya') -> ''
common_prefix('same', 'same') -> 'same'

def balanced(text):
    depth = 0
    for sign in text:
        depth += (sign == '(') - (sign == ')')
        if depth < 0:
            return @False@True@
    return depth == 0
balanced(')(') -> False
balanced('())(') -> False
balanced('(())') -> True
balanced('(') -> False

def invert(table):
    return {@value: key@key: value@ for key, value in table.items()}
invert({'a': 1}) -> {1: 'a'}
invert({2: 'x', 3: 'y'}) -> {'x': 2, 'y': 3}
invert({}) -> {}

def merge(one, other):
    return sorted(@one + other@one@)
merge([1, 4], [2]) -> [1, 2, 4]
merge([], [3]) -> [3]
merge([5], []) -> [5]

def power(base, exponent):
    found = 1
    for _ in range(exponent):
        found @*=@+=@ base
    return found
power(2, 5) -> 32
power(3, 2) -> 9
power(7, 0) -> 1
"""
"""The repositories, each a function with a fault, and what calls of it are to return."""


class Repository(NamedTuple):
    """One file of code, and what its function is to return."""

    name: str
    code: str
    tests: tuple[tuple[str, str], ...]
    """Calls, and what they return, both as Python writes them."""

    @classmethod
    def of(cls, source: str) -> Self:
        lines = source.splitlines()
        code = [line for line in lines if " -> " not in line]
        tests = tuple(
            (call, wanted) for call, arrow, wanted in (one.partition(" -> ") for one in lines) if arrow
        )
        return cls(code[0][len("def ") : code[0].index("(")], "\n".join(code) + "\n", tests)

    @property
    def right(self) -> str:
        """Return the code without the fault."""
        return FAULT.sub(r"\1", self.code)

    @property
    def wrong(self) -> str:
        """Return the code as it is."""
        return FAULT.sub(r"\2", self.code)


REPOSITORIES = tuple(map(Repository.of, SOURCES.strip().split("\n\n")))


def repository_problem(number: int) -> tuple[str, str]:
    """Return what is asked of a repository, and its name."""
    name = REPOSITORIES[number].name
    return f"The tests of {name}.py fail: run `python3 test_{name}.py`, and mend {name}.py.", name


def repository_files(number: int) -> dict[str, Json]:
    """Return the metadata of a problem: its repository, and the check that the policy does not see."""
    found = REPOSITORIES[number]
    shown = "".join(f"assert {call} == {wanted}, {call}\n" for call, wanted in found.tests[:SHOWN])
    check = CHECK.format(
        name=found.name,
        asked=[f"print(repr({call}))" for call, _ in found.tests],
        wanted=[wanted for _, wanted in found.tests],
    )
    return {
        "sandbox_files": {
            f"{found.name}.py": found.wrong,
            f"test_{found.name}.py": f"from {found.name} import {found.name}\n\n{shown}",
        },
        "sandbox_check_files": {"/tmp/check.py": check},
    }
