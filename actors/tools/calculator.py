"""The tool that computes an arithmetic expression, exactly where Python's numbers are exact."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import TypeAlias

from actors.episodes.task import JSON
from actors.tools.base import Arguments, ToolResult

Number: TypeAlias = int | float
LONGEST = 1000
"""Characters of an expression."""
LARGEST_BITS = 10_000
"""Size of an integer power; larger ones take long and fit no answer."""
BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNARY: Mapping[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
FUNCTIONS: Mapping[str, Callable[[Number], Number]] = {
    "abs": abs, "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "log10": math.log10, "sin": math.sin,
    "cos": math.cos, "tan": math.tan, "floor": math.floor, "ceil": math.ceil,
}  # fmt: skip
CONSTANTS: Mapping[str, Number] = {"pi": math.pi, "e": math.e}


class Calculator:
    """Computes numbers with + - * / // % ** ( ), a few functions, pi and e."""

    description = "Computes an arithmetic expression, such as 12*(3+4)/5, and returns its value."
    parameters: Mapping[str, JSON] = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "the expression"}},
        "required": ["expression"],
        "additionalProperties": False,
    }

    def __init__(self, name: str = "calculator") -> None:
        self.name = name

    async def call(self, arguments: Arguments) -> ToolResult:
        """Compute an expression; what is none, or has no value, is the model's mistake."""
        try:
            return ToolResult(_written(evaluated(str(arguments["expression"]))))
        except (ValueError, ArithmeticError, SyntaxError, RecursionError, MemoryError) as error:
            return ToolResult(f"error: {error}", failed=True)

    async def close(self) -> None:
        """Do nothing: nothing is held."""


def evaluated(expression: str) -> Number:
    """Return the value of an expression. Raises ValueError, ArithmeticError or SyntaxError."""
    if len(expression) > LONGEST:
        raise ValueError(
            f"the expression has {len(expression)} characters, the longest allowed has {LONGEST}"
        )
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            return UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return BINARY[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](_value(argument))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic that is known here")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > LARGEST_BITS:
        raise OverflowError("the power is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the power is no real number")  # noqa: TRY004  # a number of the wrong kind
    return value


def _written(value: Number) -> str:
    return str(value) if isinstance(value, int) else f"{value:.12g}"
