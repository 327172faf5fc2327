"""Several sources of prompts in one order: exact shares, sources that go on where they are."""

import json
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.errors import ConfigError
from storage.ledger.ledger import Ledger
from storage.prompts.data_sets import DataSets, PastPrompts
from storage.prompts.order import WINDOW, MixtureOrder, PromptOrder, PromptSource, shares
from storage.prompts.sources import load_sources, with_source
from storage.settings.data import DataConfig, PromptKeys, SourceConfig


def source(name: str, count: int, share: int, drawn: int = 0) -> PromptSource:
    return PromptSource(name=name, count=count, digest="", weight=1.0, share=share, drawn=drawn)


def rows(path, *contents: str, **metadata: object):
    lines = (json.dumps({"prompt": content, "metadata": metadata}) for content in contents)
    path.write_text("\n".join(lines))
    return path


def test_three_to_one_is_drawn_in_the_order_worked_by_hand():
    """With 3 of a and 1 of b the places wanted are 1/6, 3/6, 5/6 for a and 1/2 for b: a, a, b, a."""
    order = MixtureOrder([source("a", 2, 750), source("b", 3, 250)], seed=0, shuffle=False)
    # a gives its rows 0, 1, 0, 1, 0, 1; b, whose rows are 2, 3 and 4, gives 2 and 3
    assert [order.index(position) for position in range(8)] == [0, 1, 2, 0, 1, 0, 3, 1]


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    weights=st.lists(st.floats(0.01, 10), min_size=5, max_size=5),
    start=st.integers(0, 3),
)
def test_every_window_has_exactly_the_shares_and_any_stretch_nearly(counts, weights, start):
    parts = shares(weights[: len(counts)])
    mixed = [source(str(n), count, part) for n, (count, part) in enumerate(zip(counts, parts, strict=True))]
    order = MixtureOrder(mixed, seed=7, shuffle=True)
    drawn = Counter(order.source(start * WINDOW + n) for n in range(WINDOW))
    assert [drawn[n] for n in range(len(counts))] == parts
    some = Counter(order.source(n) for n in range(100))
    assert all(abs(some[n] - part / 10) <= len(counts) for n, part in enumerate(parts))


def test_each_source_visits_its_prompts_once_an_epoch():
    order = MixtureOrder([source("a", 7, 500), source("b", 3, 500)], seed=1, shuffle=True)
    visits = [order.index(position) for position in range(2 * 21)]
    of_a, of_b = [n for n in visits if n < 7], [n for n in visits if n >= 7]
    assert all(sorted(of_a[n : n + 7]) == list(range(7)) for n in (0, 7, 14))
    assert all(sorted(of_b[n : n + 3]) == [7, 8, 9] for n in range(0, 21, 3))
    assert of_a[:7] != of_a[7:14]


@given(st.integers(0, 4000), st.integers(1, 99))
def test_a_mixture_that_goes_on_elsewhere_draws_the_same_prompts(position, percent):
    parts = [10 * percent, WINDOW - 10 * percent]
    order = MixtureOrder([source("a", 11, parts[0]), source("b", 5, parts[1])], 3, True)
    counted = Counter(order.source(n) for n in range(position))
    assert order.drawn(position) == [counted[0], counted[1]]


def test_shares_are_the_weights_by_largest_remainders_and_nothing_starves():
    assert shares([0.5, 0.3, 0.2]) == [500, 300, 200]
    assert shares([1, 1, 1]) == [334, 333, 333]
    assert shares([1e9, 1, 1]) == [998, 1, 1]
    with pytest.raises(ConfigError, match="1001 sources of prompts, and there can be 1000"):
        shares([1.0] * 1001)


def test_other_weights_after_a_restart_go_on_where_each_source_was(tmp_path):
    """Nothing is skipped or drawn twice: sources keep their places over changes of weights and restarts."""
    a, b = [f"a{n}" for n in range(40)], [f"b{n}" for n in range(40)]
    config = {"a": rows(tmp_path / "a.jsonl", *a), "b": rows(tmp_path / "b.jsonl", *b)}
    issued: list[str] = []
    for weights in ({"a": 3.0, "b": 1.0}, {"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 1.0}):
        prompts, sources = load_sources(
            [SourceConfig(name=n, prompts=config[n], weight=w) for n, w in weights.items()],
            PromptKeys(),
            tmp_path,
        )
        with closing(Ledger.open(tmp_path / "ledger.db")) as ledger:
            sets = DataSets(ledger, tmp_path)
            sets.configure(prompts, seed=0, shuffle=False, source="both", sources=sources)
            asked = [sets.prompt(lease) for lease in ledger.issue(8, policy_version=0)]
            assert [one.metadata["source"] for one in asked] == [str(one.content)[0] for one in asked]
            issued += [str(one.content) for one in asked]
            assert sets.drawn == Counter(one[0] for one in issued)
    assert [one for one in issued if one.startswith("a")] == a[: 6 + 6 + 4]
    assert [one for one in issued if one.startswith("b")] == b[: 2 + 2 + 4]
    with closing(Ledger.open(tmp_path / "ledger.db")) as ledger:
        past = PastPrompts(ledger.facts, tmp_path)
    assert [past.of(lease).content for lease in range(24)] == issued
    assert [past.of(lease).metadata for lease in range(24)] == [{"source": one[0]} for one in issued]
    named = replace(past.of(0), metadata={"source": "own"})
    assert with_source(named, "a") == named


def test_a_mix_changed_while_the_run_goes_on_is_there_after_a_restart(tmp_path):
    prompts, sources = load_sources(
        [
            SourceConfig(name=n, prompts=rows(tmp_path / f"{n}.jsonl", *(f"{n}{i}" for i in range(50))))
            for n in "ab"
        ],
        PromptKeys(),
        tmp_path,
    )
    with closing(Ledger.open(tmp_path / "ledger.db")) as ledger:
        sets = DataSets(ledger, tmp_path)
        sets.configure(prompts, seed=0, shuffle=True, source="both", sources=sources)
        ledger.issue(10, policy_version=0)
        sets.mix({"a": 9.0, "b": 1.0})
        before = [sets.prompt(lease).content for lease in ledger.issue(20, policy_version=0)]
        assert Counter(str(one)[0] for one in before) == {"a": 18, "b": 2}
    with closing(Ledger.open(tmp_path / "ledger.db")) as ledger:
        sets = DataSets(ledger, tmp_path)
        sets.configure(prompts, seed=0, shuffle=True, source="both", sources=sources)
        assert [sets.prompt(lease).content for lease in range(10, 30)] == before
        assert [one.share for one in sets.latest.sources] == [900, 100]
        assert sets.drawn == {"a": 5 + 18, "b": 5 + 2}


def test_the_order_of_a_source_does_not_depend_on_the_others():
    alone = MixtureOrder([source("a", 30, WINDOW)], seed=5, shuffle=True)
    beside = MixtureOrder([source("b", 4, 500), source("a", 30, 500)], seed=5, shuffle=True)
    found = [beside.index(n) - 4 for n in range(60) if beside.source(n) == 1]
    assert found == [alone.index(n) for n in range(30)]
    assert sorted(found) == list(range(30))
    assert isinstance(PromptOrder(30, 5, shuffle=True).index(0), int)


def test_buckets_divide_a_source_and_its_weight_by_their_number_of_prompts(tmp_path):
    file = tmp_path / "a.jsonl"
    levels = [1, 1, 1, 2]
    file.write_text(
        "\n".join(
            json.dumps({"prompt": f"p{n}", "metadata": {"level": level}}) for n, level in enumerate(levels)
        )
    )
    prompts, found = load_sources(
        [
            SourceConfig(name="math", prompts=file, weight=2, buckets="level"),
            SourceConfig(name="chat", prompts=rows(tmp_path / "b.jsonl", "hi"), weight=1),
        ],
        PromptKeys(),
        tmp_path,
    )
    assert [(one.name, one.count, one.weight) for one in found] == [
        ("math=1", 3, 1.5),
        ("math=2", 1, 0.5),
        ("chat", 1, 1.0),
    ]
    assert [prompt.content for prompt in prompts] == ["p0", "p1", "p2", "p3", "hi"]


def test_prompts_of_a_source_have_its_reward_unless_they_choose_another(tmp_path):
    file = rows(tmp_path / "a.jsonl", "one", "two", level=1)
    with file.open("a") as more:
        more.write("\n" + json.dumps({"prompt": "three", "metadata": {"reward": "exact"}}))
    prompts, _ = load_sources([SourceConfig(name="a", prompts=file, reward="math")], PromptKeys(), tmp_path)
    assert [prompt.metadata.get("reward") for prompt in prompts] == ["math", "math", "exact"]


def test_a_field_that_cannot_divide_a_source_is_refused(tmp_path):
    file = rows(tmp_path / "a.jsonl", "one", level=None)
    with pytest.raises(ConfigError, match=r"prompt 1: .*'a' is divided by 'level', which its metadata lack"):
        load_sources([SourceConfig(name="a", prompts=file, buckets="level")], PromptKeys(), tmp_path)
    many = tmp_path / "many.jsonl"
    many.write_text("\n".join(json.dumps({"prompt": "p", "metadata": {"id": n}}) for n in range(101)))
    with pytest.raises(ConfigError, match="'id' has more than 100 values, of which no more can divide"):
        load_sources([SourceConfig(name="a", prompts=many, buckets="id")], PromptKeys(), tmp_path)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"sources": [{"name": "a", "prompts": "a.jsonl", "weight": -1}]}, "greater than 0"),
        ({"sources": [{"name": "a", "prompts": "a.jsonl", "weight": 0}]}, "greater than 0"),
        ({"sources": [{"name": "a", "prompts": "a.jsonl", "weight": float("nan")}]}, "finite|greater"),
        ({"sources": [{"name": "a b", "prompts": "a.jsonl"}]}, "pattern"),
        ({"sources": [{"name": "a", "prompts": "a.jsonl"}] * 2}, "two sources are named 'a'"),
        ({"prompts": "x", "sources": [{"name": "a", "prompts": "a.jsonl"}]}, "beside sources"),
        ({"curriculum": {"type": "learnability"}}, "of which there are 0"),
    ],
)
def test_sources_that_make_no_mixture_are_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        DataConfig.model_validate(settings)


def test_an_empty_source_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no rows"):
        load_sources([SourceConfig(name="a", prompts=tmp_path / "a.jsonl")], PromptKeys(), tmp_path)


async def test_prompts_are_not_added_to_a_mixture(tmp_path):
    prompts, sources = load_sources(
        [SourceConfig(name=n, prompts=rows(tmp_path / f"{n}.jsonl", n)) for n in "ab"], PromptKeys(), tmp_path
    )
    with closing(Ledger.open(tmp_path / "ledger.db")) as ledger:
        sets = DataSets(ledger, tmp_path)
        sets.configure(prompts, seed=0, shuffle=True, source="both", sources=sources)
        with pytest.raises(ConfigError, match=r"mixes prompts of several sources \(a, b\)"):
            await sets.add(prompts, keep_old=True, source="more")
        await sets.add(prompts[:1], keep_old=False, source="other")
        [lease] = ledger.issue(1, policy_version=0)
        assert sets.prompt(lease).content == "a"
        assert sets.source(lease) == ""
