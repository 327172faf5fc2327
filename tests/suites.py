"""Which of many cases of a test are tried in every run of its suite."""

from collections.abc import Iterable, Mapping

import pytest


def thinned(
    cases: Iterable[str] | Mapping[str, object], *kept: str, rest: pytest.MarkDecorator
) -> list[object]:
    """Return cases as parameters of a test; those that vary what the `kept` ones hold get the mark `rest`."""
    named = cases if isinstance(cases, Mapping) else {name: name for name in cases}
    if unknown := set(kept) - named.keys():
        raise pytest.UsageError(f"no such cases: {sorted(unknown)}")
    return [pytest.param(value, id=name, marks=() if name in kept else rest) for name, value in named.items()]
