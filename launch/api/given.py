"""Prompts, functions and classes that a program or a notebook gives as they are, as files for the processes
of the run."""

import ast
import hashlib
import inspect
import json
import linecache
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
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
        rows = [{"prompt": one} if isinstance(one, str) else dict(one) for one in given]
        self._texts["prompts.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
        return self.directory / "prompts.jsonl"

    def named(self, given: Given) -> str:
        """Return a function or class as `module:name`, by which the processes of a run import it.

        One of a notebook, or of the program itself, becomes a module with what it uses of there: imports,
        functions, classes and plain values. Raises `ConfigError` for what cannot be written so."""
        if "<" in given.__qualname__:  # a lambda, or something inside a function
            raise ConfigError(f"{given.__qualname__} has no name of its own: define it at the top of a cell")
        if given.__module__ != "__main__":
            return f"{given.__module__}:{given.__qualname__}"
        text = "\n".join(_Source(given).lines) + "\n"
        name = MODULE + hashlib.sha256(text.encode()).hexdigest()[:12]
        self._texts[f"{name}.py"] = text
        return f"{name}:{given.__name__}"

    def write(self) -> bool:
        """Write the files; return whether there are any."""
        if self._texts:
            make_directory(self.directory)
        for name, text in self._texts.items():
            (self.directory / name).write_text(text)
        return bool(self._texts)


class _Source:
    """The source of something of `__main__`, behind what it uses of there."""

    def __init__(self, given: Given) -> None:
        self.lines: list[str] = []
        self._known = dict(vars(sys.modules["__main__"]))
        self._written: set[str] = set()
        self._write(given.__name__)

    def _write(self, name: str) -> None:
        if name in self._written or name not in self._known:
            return
        self._written.add(name)
        value = self._known[name]
        if isinstance(value, ModuleType):
            self.lines.append(f"import {value.__name__} as {name}")
        elif getattr(value, "__module__", None) not in ("__main__", None) and hasattr(value, "__qualname__"):
            self.lines.append(f"from {value.__module__} import {value.__qualname__} as {name}")
        elif isinstance(value, FunctionType | type):
            text = _text(value)
            for used in _names(text):
                self._write(used)
            self.lines.append(text)
        elif _is_plain(value):
            self.lines.append(f"{name} = {value!r}")
        else:
            raise ConfigError(
                f"{name} is {type(value).__name__}, which no file can hold as it is: make it in the function "
                "that uses it, or put both into a .py file and give that as my_module:function"
            )


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
    source = "".join(linecache.getlines(code.co_filename))
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    for one in classes:
        if one.name == name and one.lineno <= code.co_firstlineno <= (one.end_lineno or 0):
            return ast.get_source_segment(source, one)
    return None


def _names(text: str) -> list[str]:
    """Return the names that a source reads, in their order."""
    reads = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    return list(dict.fromkeys(node.id for node in reads))


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)
