"""What runs in the sandbox for tests that call a program: the program, and apart from it the tests.

Each is a program of its own, in a sandbox of its own: the text of this file and one line that calls
`serve_program` or `run_tests`. They talk over the socket that is their descriptor 3. Only plain data and
references travel, so that a program sees neither the tests nor what they expect, and cannot reach what
compares. Loads the standard library alone.
"""

import ast
import builtins
import importlib
import json
import os
import struct
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from numbers import Integral
from select import select
from time import monotonic
from typing import Any, NoReturn

LINK = 3
LARGEST_MESSAGE = 1 << 24
LONGEST_REASON = 300
KINDS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
Wire = Any
"""JSON of a value, as `packed` writes it."""


def packed(value: object, refer: Callable[[object], Wire]) -> Wire:
    """Return plain data as JSON; what is none becomes whatever `refer` makes of it."""
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, Integral):
        number = int(value)
        return number if abs(number) < 1 << 63 else {"int": hex(number)}  # decimals have a limit of digits
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[packed(key, refer), packed(one, refer)] for key, one in value.items()]}
    for name, kind in KINDS.items():
        if isinstance(value, kind):
            return {name: [packed(one, refer) for one in value]}
    return refer(value)


def unpacked(wire: Wire, find: Callable[[int], object]) -> Any:
    """Return what `packed` was given; `find` tells what a reference stands for."""
    if not isinstance(wire, dict):
        return wire
    [(kind, held)] = wire.items()
    if kind == "object":
        return find(int(held))
    if kind == "int":
        return int(held, 16)
    if kind == "complex":
        return complex(*held)
    if kind == "bytes":
        return bytes.fromhex(held)
    if kind == "dict":
        return {unpacked(key, find): unpacked(one, find) for key, one in held}
    return KINDS[kind](unpacked(one, find) for one in held)


def send(message: Wire) -> None:
    """Write one message. Raises OSError where nobody reads it."""
    data = json.dumps(message).encode()
    data = struct.pack("!I", len(data)) + data
    while data:
        data = data[os.write(LINK, data) :]


def receive(until_s: float | None = None) -> Wire:
    """Read one message. Raises TimeoutError at `until_s`, EOFError at the end, ValueError for others."""
    (length,) = struct.unpack("!I", _read(4, until_s))
    if length > LARGEST_MESSAGE:
        raise ValueError(f"a message of {length} bytes")
    return json.loads(_read(length, until_s))


def _read(count: int, until_s: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        left_s = None if until_s is None else max(0.0, until_s - monotonic())
        if not select([LINK], [], [], left_s)[0]:
            raise TimeoutError
        if not (piece := os.read(LINK, count - len(data))):
            raise EOFError
        data += piece
    return bytes(data)


# --- the program ---


class Served:
    """A program, and the objects of it that the tests hold."""

    def __init__(self, source: str) -> None:
        self._objects: list[object] = []
        module = sys.modules["program"] = types.ModuleType("program")
        self._names = module.__dict__
        exec(compile(source, "program.py", "exec", dont_inherit=True), self._names)

    def answer(self, request: list[Wire]) -> Wire:
        """Do what the tests ask for; whatever is raised is an answer too."""
        try:
            what, *rest = (unpacked(one, self._objects.__getitem__) for one in request)
            value = getattr(self, f"_{what}")(*rest)
            changed = rest[1] if what == "call" else []
            return {"value": self._packed(value), "arguments": [self._packed(one) for one in changed]}
        except BaseException as error:  # noqa: BLE001  # a program may raise anything
            return {"raised": type(error).__name__, "text": str(error)}

    def _packed(self, value: object) -> Wire:
        return packed(value, self._refer)

    def _refer(self, value: object) -> Wire:
        self._objects.append(value)
        return {"object": len(self._objects) - 1}

    def _name(self, name: str) -> object:
        """Return what the program calls so; a method of the class Solution counts as a function."""
        if name not in self._names and hasattr(self._names.get("Solution"), name):
            return getattr(self._names["Solution"](), name)
        if name not in self._names:
            raise NameError(f"the program defines no {name!r}")
        return self._names[name]

    def _call(self, function: Any, arguments: list[object], named: dict[str, object]) -> object:
        return function(*arguments, **named)

    def _get(self, value: object, name: str) -> object:
        return getattr(value, name)

    def _set(self, value: object, name: str, held: object) -> None:
        setattr(value, name, held)

    def _iter(self, value: Any) -> Iterator[object]:
        return iter(value)

    def _next(self, value: Any) -> list[object]:
        for one in value:
            return [one]
        return []

    def _len(self, value: Any) -> int:
        return len(value)

    def _item(self, value: Any, key: object) -> object:
        return value[key]


def serve_program(source: str) -> None:
    """Run a program, then do what the tests ask until they end."""
    try:
        served = Served(source)
    except BaseException as error:  # noqa: BLE001  # a program may raise anything
        send({"raised": type(error).__name__, "text": str(error)})
        return
    send({"value": None, "arguments": []})
    with suppress(EOFError, OSError):
        while True:
            send(served.answer(receive()))


# --- the tests ---


class GoneError(Exception):
    """The program has ended, takes too long, or says what is no answer."""


class RaisedError(Exception):
    """The program raised what is no built-in exception."""


class Link:
    """Asks the program, which has `call_s` seconds for each answer."""

    def __init__(self, call_s: float) -> None:
        self._call_s = call_s
        self.gone = False
        self.used = False
        """Whether the program was asked for anything by what runs now."""
        self.raised: BaseException | None = None

    def ask(self, *request: object) -> Any:
        """Return what the program answers; raises what it raised, and GoneError."""
        self.used = True
        wire = [packed(one, self._refer) for one in request]
        if self.gone:
            raise GoneError
        try:
            send(wire)
            return self._answer(request)
        except (EOFError, OSError) as error:
            self.gone = True
            raise GoneError from error

    def begin(self) -> bool:
        """Wait until the program has begun; return whether it has."""
        try:
            return self._answer(()) is None
        except Exception:  # noqa: BLE001  # whatever it raised or sent, it has not begun
            return False

    def _answer(self, request: tuple[object, ...]) -> Any:
        """Read an answer. Arguments that the program has changed in place change here as well."""
        remote = partial(RemoteObject, self)
        try:
            reply = receive(monotonic() + self._call_s)
            name = reply.get("raised")
            if name is None:
                value = unpacked(reply["value"], remote)
                changed = [unpacked(one, remote) for one in reply["arguments"]]
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError, MemoryError) as error:
            raise EOFError from error
        if name is not None:
            self._raise(str(name), str(reply.get("text")))
        if request and request[0] == "call":
            for old, new in zip(request[2], changed, strict=False):  # type: ignore[call-overload]
                _replace(old, new)
        return value

    def _raise(self, name: str, text: str) -> NoReturn:
        kind = getattr(builtins, name, None)
        self.raised = RaisedError(f"{name}: {text}")
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                self.raised = kind(text)
            except TypeError:  # the exception takes other arguments
                self.raised = kind.__new__(kind)
        raise self.raised

    def _refer(self, value: object) -> Wire:
        if isinstance(value, RemoteObject):
            return {"object": object.__getattribute__(value, "_number")}
        raise NotImplementedError(f"a test gives the program {value!r}, and only plain data can be given")


class RemoteObject:
    """An object of the program. It equals itself alone: whether it equals another would be its own word."""

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: object, **named: object) -> Any:
        return self._link.ask("call", self, list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that it has in the program, but for those that libraries ask of any object."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._link.ask("set", self, name, value)

    def __iter__(self) -> Iterator[Any]:
        walked = self._link.ask("iter", self)
        if not isinstance(walked, RemoteObject):
            raise TypeError("the program's object is no iterator")
        while one := self._link.ask("next", walked):
            yield one[0]

    def __len__(self) -> int:
        return int(self._link.ask("len", self))

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: object) -> Any:
        return self._link.ask("item", self, key)


def _replace(old: Any, new: Any) -> None:
    """Make a list, a dict or a set of the tests what the program has made of its copy."""
    if type(old) is type(new) and isinstance(old, list | dict | set) and old != new:
        old.clear()
        old.extend(new) if isinstance(old, list) else old.update(new)


def wanted_names(sources: list[str], entry: str | None) -> tuple[set[str], set[str]]:
    """Return the names that tests need from elsewhere: of the program, and of modules that they forgot. A
    name of Python's own is never the program's, which could otherwise put a comparison of its own in."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    own = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            own |= {one.asname or one.name.partition(".")[0] for one in node.names}
    open_names = used - own - set(dir(builtins))
    whole = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    alone = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in whole}
    modules = (open_names & sys.stdlib_module_names) - alone
    return (open_names - modules) | ({entry} if entry else set()), modules


def same_data(found: object, wanted: object) -> bool:
    """Return whether plain data are equal; tuples count as lists, as JSON has only these."""
    if isinstance(found, tuple | list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same_data, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        named = {str(key): value for key, value in found.items()}
        return named.keys() == wanted.keys() and all(same_data(named[key], wanted[key]) for key in named)
    return bool(found == wanted)


class RunningTests:
    """The tests of a prompt, against the program behind a link."""

    def __init__(self, given: dict[str, Any], link: Link) -> None:
        self._given = given
        self._link = link
        self._space: dict[str, Any] = {"__name__": "tests"}

    def prepare(self) -> None:
        """Find what the tests name, and run what precedes them."""
        sources = [self._given["setup"], *self._given["statements"]]
        names, modules = wanted_names(sources, self._given["entry"])
        self._space.update({name: importlib.import_module(name) for name in modules})
        for name in sorted(names):
            with suppress(NameError):  # the test that needs it fails by it
                self._space[name] = self._link.ask("name", name)
        if entry := self._given["entry"]:
            self._space["candidate"] = self._space.get(entry)
        self._link.used = False
        self._run(self._given["setup"])

    def passes(self, number: int) -> bool:
        statements = self._given["statements"]
        if number < len(statements):
            self._run(statements[number])
            return not self._link.gone
        call = self._given["calls"][number - len(statements)]
        found = self._link.ask("call", self._link.ask("name", call["function"]), call["arguments"], {})
        return any(same_data(found, one) for one in call["returns"])

    def _run(self, source: str) -> None:
        exec(compile(source, "tests.py", "exec", dont_inherit=True), self._space)

    def is_own(self, error: BaseException) -> bool:
        """Return whether an exception tells that the tests are wrong, and not the program."""
        return error is not self._link.raised and isinstance(error, ImportError | NotImplementedError)


def fault(error: BaseException) -> dict[str, str]:
    """Return what is wrong with tests, in a line that is written at once."""
    return {"broken": f"{type(error).__name__}: {error}"[:LONGEST_REASON]}


def run_tests() -> None:
    """Run the tests that standard input holds; write a line for each: true, false, or what is wrong with it.
    Where the program does not even begin there is no line, and all have failed."""
    given = json.load(sys.stdin)
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print is no result

    def tell(result: object) -> None:
        print(json.dumps(result), file=results, flush=True)

    link = Link(given["call_s"])
    if not link.begin():
        return
    tests = RunningTests(given, link)
    try:
        tests.prepare()
    except BaseException as error:  # noqa: BLE001  # tests may raise anything
        if tests.is_own(error) or not link.used:
            tell(fault(error))
        return
    for number in range(len(given["statements"]) + len(given["calls"])):
        try:
            tell(tests.passes(number))
        except BaseException as error:  # noqa: BLE001  # tests may raise anything
            tell(fault(error) if tests.is_own(error) else False)
