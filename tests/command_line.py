"""The command line called many times in one process, as only tests do."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cyclopts import App
from cyclopts.argument import ArgumentCollection, _collection

ASSEMBLE = App.assemble_argument_collection


def fresh(arguments: ArgumentCollection) -> ArgumentCollection:
    """Return arguments to which a command line may give values, without changing these."""
    copies = {id(argument): copy.copy(argument) for argument in arguments}
    for argument in copies.values():
        argument.tokens = []
        argument.children = ArgumentCollection(copies[id(child)] for child in argument.children)
    return ArgumentCollection(copies.values())


@contextmanager
def arguments_assembled_once() -> Iterator[None]:
    """Find out the arguments of each command once: it takes 0.1 s for one with all settings of a run.

    Cyclopts goes through all of them twice, first for groups that others name; ours name none."""
    known: dict[tuple[int, bool], tuple[object, ArgumentCollection]] = {}

    def assemble(self: App, *, default_parameter=None, parse_docstring: bool = False) -> ArgumentCollection:
        if default_parameter is not None:
            return ASSEMBLE(self, default_parameter=default_parameter, parse_docstring=parse_docstring)
        command, arguments = known.get((id(self), parse_docstring), (None, None))
        if arguments is None or command is not self.default_command:
            arguments = ASSEMBLE(self, parse_docstring=parse_docstring)
            groups = [group for argument in arguments for group in argument.parameter.group]
            named = {group.name: group for group in groups}
            assert all(named[group.name] == group for group in groups), "cyclopts takes one group of a name"
            known[id(self), parse_docstring] = self.default_command, arguments
        return fresh(arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(App, "assemble_argument_collection", assemble)
        patch.setattr(_collection, "_resolve_groups_from_callable", lambda *_, **default: default.values())
        yield
