"""Prompts, functions and classes that a program or a notebook gives as they are, as files for the processes
of the run."""

import ast
import hashlib
import inspect
import json
import linecache
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from bus.errors import ConfigError
from storage.disk.atomic_files import make_directory

Given = Callable[..., Any] | type
PLAIN = (str, int, float, bool, bytes, type(None))
MODULE = "given_"


class GivenFiles:
    """Files of a run's directory that hold what a program gave it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "given"
        self._texts: dict[str, str] = {}

    def prompts(self, given: Sequence[str | Mapping[str, Any]]) -> Path:
        """Return the file of prompts, which are texts or rows such as {"prompt": ..., "label": ...}."""
        if not isinstance(given, Sequence):  # a table's columns would be taken for prompts
            raise ConfigError(f"prompts is {type(given).__name__}: give a list of texts or rows, or a file")
        rows = [{"prompt": one} if isinstance(one, str) else one for one in given]
        lines = [_json(number, row) for number, row in enumerate(rows, 1)]
        self._texts["prompts.jsonl"] = "".join(line + "\n" for line in lines)
        return self.directory / "prompts.jsonl"

    def named(self, given: Given) -> str:
        """Return a function or class as `module:name`, by which the processes of a run import it.

        One of a notebook, or of the program itself, becomes a module with what it uses of there: imports,
        functions, classes and plain values. Raises `ConfigError` for what cannot be written so."""
        name = getattr(given, "__qualname__", f"{type(given).__name__}(...)")  # else an object that is called
        if "<" in name or "(" in name:  # or a lambda, or something inside a function
            raise ConfigError(f"{name} has no name of its own: define it at the top of a cell")
        if given.__module__ != "__main__":
            return f"{given.__module__}:{given.__qualname__}"
        text = "\n".join(_Source(given).lines) + "\n"
        module = MODULE + hashlib.sha256(text.encode()).hexdigest()[:12]
        self._texts[f"{module}.py"] = text
        return f"{module}:{given.__name__}"

    def write(self) -> bool:
        """Write the files; return whether there are any."""
        if self._texts:
            make_directory(self.directory)
        for name, text in self._texts.items():
            (self.directory / name).write_text(text, encoding="utf-8")
        return bool(self._texts)


def _json(number: int, row: object) -> str:
    if not isinstance(row, Mapping):
        raise ConfigError(f"prompt {number} is {type(row).__name__}: make it a text or a row")
    try:
        return json.dumps(dict(row))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"prompt {number} is no JSON: {error}") from error


class _Source:
    """The source of something of `__main__`, behind what it uses of there."""

    def __init__(self, given: Given) -> None:
        self.lines = ["from math import inf, nan"]  # by which values are written
        self._known = dict(vars(sys.modules["__main__"]))
        self._written: set[str] = set()
        self._write_definition(given.__name__, given)

    def _write(self, name: str) -> None:
        if name in self._written or name not in self._known:
            return
        self._written.add(name)
        value = self._known[name]
        if isinstance(value, ModuleType):
            self.lines.append(f"import {value.__name__} as {name}")
        elif (attribute := _attribute_of_module(name, value)) is not None:
            self.lines.append(f"from {value.__module__} import {attribute} as {name}")
        elif isinstance(inspect.unwrap(value), FunctionType | type):
            self._write_definition(name, value)
        elif _is_plain(value):
            self.lines.append(f"{name} = {value!r}")
        else:
            raise ConfigError(
                f"{name} is {type(value).__name__}, which no file can hold as it is: make it in the function "
                "that uses it, or put both into a .py file and give that as my_module:function"
            )

    def _write_definition(self, name: str, value: Given) -> None:
        own = name if value.__name__ == "<lambda>" else value.__name__
        if self._known.get(own) is not value:
            raise ConfigError(
                f"{name} is not the {own} that is defined now, so that its source is not known: run again "
                "the cells that use it, or put it into a .py file"
            )
        if own != name:
            self._write(own)
            self.lines.append(f"{name} = {own}")
            return
        self._written.add(name)
        text = _text(value)
        table = symtable.symtable(text, name, "exec")
        if name not in [symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()]:
            raise ConfigError(f"{name} has no definition of its own: define it by def at the top of a cell")
        for used in _globals(table):
            self._write(used)
        self.lines += [*self._submodules(text), text]

    def _submodules(self, text: str) -> list[str]:
        """Return the imports of modules that a source reaches as attributes, as `xml.etree.ElementTree`."""
        chains = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute))
        parts = [ast.unparse(node).partition(".") for node in chains]
        modules = [
            f"{self._known[root].__name__}.{rest}"
            for root, _, rest in parts
            if isinstance(self._known.get(root), ModuleType)
        ]
        return [f"import {module}" for module in sorted(set(modules)) if module in sys.modules]


def _attribute_of_module(name: str, value: object) -> str | None:
    """Return by what name the module of an imported value has it; None where it has it by none."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module == "__main__":
        return None
    names = (getattr(value, "__name__", name), name)
    return next((one for one in names if getattr(sys.modules.get(module), one, None) is value), None)


def _text(value: Given) -> str:
    """Return the source of a function or class of `__main__`. Raises `ConfigError` where there is none."""
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):  # a class of a notebook names no file, but its methods do
        pass
    for code in (m.__code__ for m in vars(value).values() if isinstance(m, FunctionType)):
        if (found := _class_around(code, value.__name__)) is not None:
            return found
    raise ConfigError(f"the source of {value.__name__} is not known: put it into a .py file")


def _class_around(code: CodeType, name: str) -> str | None:
    lines = linecache.getlines(code.co_filename)
    classes = [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.ClassDef)]
    for one in classes:
        if one.name == name and one.lineno <= code.co_firstlineno <= (one.end_lineno or 0):
            first = min([one.lineno, *(decorator.lineno for decorator in one.decorator_list)])
            return textwrap.dedent("".join(lines[first - 1 : one.end_lineno]))
    return None


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that a source reads of its module; those of its own variables are not among them."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _globals(inner)


def _is_plain(value: object) -> bool:
    if type(value) is dict:
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    return type(value) in PLAIN
