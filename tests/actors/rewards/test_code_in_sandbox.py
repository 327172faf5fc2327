"""What travels between a program and its tests, and which names the tests take from it."""

import math
from collections import Counter, OrderedDict
from enum import IntEnum

import numpy as np
import pytest

from actors.rewards.code.in_sandbox import (
    Link,
    RemoteObject,
    Served,
    packed,
    same_data,
    unpacked,
    wanted_names,
)


def refuse(value):
    raise NotImplementedError(value)


def travelled(value):
    return unpacked(packed(value, refuse), refuse)


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 1 << 70, -(1 << 70), 0.5, "a\ud800", b"\x00\xff", 1 + 2j, [], (1, [2]), {1, 2},
        frozenset({3}), {"a": {1: None}, (1, 2): [True]}, {}, math.inf,
    ],
)  # fmt: skip
def test_plain_data_travel_as_they_are(value):
    found = travelled(value)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("value", "base"),
    [
        (Counter("aab"), dict),
        (OrderedDict(a=1), dict),
        (Colour.RED, int),
        (np.int64(3), int),
        (np.float64(0.5), float),
        (bytearray(b"a"), bytes),
    ],
)
def test_data_of_other_classes_travel_as_plain_data(value, base):
    assert type(travelled(value)) is base
    assert travelled(value) == value


def test_an_object_is_given_by_reference_and_equals_nothing_but_itself():
    class Anything:
        __hash__ = None

        def __eq__(self, other):
            return True

    program = Served("def f(): return g\ndef g(x): return x")
    program._names["thing"] = Anything()
    number = program.answer(["name", "thing"])["value"]["object"]
    remote = RemoteObject(Link(10.0), number)
    assert packed(remote, Link(10.0)._refer) == {"object": number}
    assert not same_data(remote, 5)
    assert not same_data([remote], [5])
    assert remote != 5
    assert remote != RemoteObject(Link(10.0), number)
    with pytest.raises(NotImplementedError, match="only plain data can be given"):
        packed(len, Link(10.0)._refer)


def test_what_libraries_ask_of_any_object_is_not_asked_of_the_program():
    link = Link(10.0)
    remote = RemoteObject(link, 0)
    assert not hasattr(remote, "__array_interface__")
    assert not link.used
    assert np.asarray(remote).dtype == object


@pytest.mark.parametrize(
    ("sources", "entry", "names", "modules"),
    [
        (["assert f(1) == 2"], None, {"f"}, set()),
        (["assert abs(f(1) - 2) < 1"], None, {"f"}, set()),
        (["import numpy as np\nassert np.all(f(x) for x in [1])"], None, {"f"}, set()),
        (["assert math.isclose(f(1), 2)"], None, {"f"}, {"math"}),
        (["assert queue(1) == 2"], None, {"queue"}, set()),
        (["def check(c):\n    y = c(1)\n    assert y == own(1)\ndef own(x): return x"], "f", {"f"}, set()),
        (["assert sum(1, 2) == 3"], "sum", {"sum"}, set()),
        (["try:\n    f()\nexcept ValueError as e:\n    assert e.args"], None, {"f"}, set()),
    ],
)
def test_tests_take_from_the_program_what_is_neither_theirs_nor_pythons(sources, entry, names, modules):
    assert wanted_names(sources, entry) == (names, modules)
