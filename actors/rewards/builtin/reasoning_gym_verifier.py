"""Runs the verifiers of reasoning-gym, in processes of their own that may be killed at any time. Some of them
evaluate the answer as Python, whole or by sympy's `parse_expr`. Here nothing that an answer says is run: it
could give itself any reward, and the answers after it."""

import ast
import re
import sys
from collections.abc import Callable
from typing import Any

from actors.rewards.builtin.verifier_processes import limit_memory
from storage.built_in_tasks.reasoning_gym_tasks import Entry, data_set

_NAME = re.compile(r"[^\W\d]\w*")
_MATHEMATICAL = frozenset({
    "abs", "Abs", "Integral", "acos", "acosh", "acot", "acsc", "asec", "asin", "asinh", "atan", "atanh",
    "cbrt", "ceiling", "cos", "cosh", "cot", "coth", "csc", "erf", "erfc", "erfi", "exp", "factorial",
    "floor", "li", "ln", "log", "max", "Max", "min", "Min", "oo", "pi", "Rational", "root", "sec",
    "sign", "sin", "sinh", "sqrt", "tan", "tanh",
})  # fmt: skip
"""Names in expressions besides those of one letter."""
_ARITHMETIC = re.compile(r"(?:0x[0-9a-f]+|\d+|[\s+\-*/%&|^~<>()])*")
_PLAIN = re.compile(r"[\w\s.,+\-*/^()!%<>=|]*")


class UnreadableError(ValueError):
    """The answer is no expression: it would be run as a program."""


def prepare() -> None:
    """Limit the memory of this process, and have verifiers read answers as data."""
    import reasoning_gym
    import sympy  # type: ignore[import-untyped]
    from sympy.parsing import sympy_parser  # type: ignore[import-untyped]

    limit_memory()
    parse = sympy_parser.parse_expr
    guarded = _parser_of_expressions(parse)
    modules = [
        module for name, module in sys.modules.items() if name.startswith(f"{reasoning_gym.__name__}.")
    ]
    for module in (sympy, *modules):  # not sympy's own module of it, by which sympy reads texts of its own
        if getattr(module, "parse_expr", None) is parse:
            module.parse_expr = guarded
    for module in modules:
        module.eval = _literal  # type: ignore[attr-defined]  # names of a module come before those of Python


def score(name: str, entry: Entry, text: str) -> float:
    """Return what the verifier of the data set `name` gives an answer; raises whatever it raises."""
    return float(data_set(name, 1, 0).score_answer(answer=text, entry=entry))


def _literal(text: str) -> Any:
    """Return the value of a literal, or of operations on whole numbers alone."""
    return eval(text, {"__builtins__": {}}) if _ARITHMETIC.fullmatch(text) else ast.literal_eval(text)


def _parser_of_expressions(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return sympy's parser for texts of numbers, operators, letters and functions alone."""

    def parsed(text: str, *arguments: Any, **named: Any) -> Any:
        names = {name for name in _NAME.findall(text) if len(name) > 1} - _MATHEMATICAL
        if names or not _PLAIN.fullmatch(text):
            raise UnreadableError(f"no expression of numbers, letters and functions: {text[:100]!r}")
        return parse(text, *arguments, **named)

    return parsed
