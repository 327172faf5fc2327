"""How long contexts are expected to become, from what is under way and what has ended."""

from actors.policy.context_tokens import ContextTokens


def begun(contexts: ContextTokens, lease_id: int, samples: int = 2) -> list[str]:
    names = [f"g{lease_id}.{n}" for n in range(samples)]
    contexts.begin(lease_id, names)
    return names


def test_nothing_is_expected_of_a_further_lease_before_the_first_has_asked():
    contexts = ContextTokens()
    assert contexts.expected(shares_prefixes=False) == (0, None)
    begun(contexts, 0)
    assert contexts.expected(shares_prefixes=False) == (0, None)


def test_first_contexts_are_expected_to_take_all_that_their_answers_may():
    contexts = ContextTokens()
    one, _ = begun(contexts, 0)
    contexts.note(one, "solver", 100, 50)
    # both rollouts: a prompt of 100 and an answer of 50; a further lease is the same
    assert contexts.expected(shares_prefixes=False) == (300, 300.0)
    assert contexts.expected(shares_prefixes=True) == (200, 200.0)


def test_ended_episodes_say_how_far_others_grow_and_long_ones_count_as_they_are():
    contexts = ContextTokens()
    for lease_id, grown in ((0, 10), (1, 30)):
        for name in begun(contexts, lease_id):
            contexts.note(name, "solver", 100, 50)
            contexts.note(name, "solver", 100 + grown)
        contexts.end(lease_id)
    one, other = begun(contexts, 2)
    contexts.note(one, "solver", 100, 50)
    contexts.note(other, "solver", 100, 50)
    # ended ones grew by 10, 10, 30 and 30, and the two under way may by 50: 30 on average
    assert contexts.expected(shares_prefixes=False) == (260, 260.0)
    contexts.note(one, "solver", 120)  # of 10, 10, 30, 30, 50 and 20 + 50, those above 20 are 45 on average
    expected = 200 + (30 + 30 + 50 + 70) / 4 + (10 + 10 + 30 + 30 + 50 + 70) / 6
    assert contexts.expected(shares_prefixes=False)[0] == int(expected)
    contexts.note(one, "solver", 300)  # beyond all others: another answer
    assert contexts.expected(shares_prefixes=False)[0] == int(200 + 250 + (130 + 250) / 6)


def test_agents_of_an_episode_have_contexts_of_their_own():
    contexts = ContextTokens()
    [one] = begun(contexts, 0, samples=1)
    contexts.note(one, "solver", 100, 5)
    contexts.note(one, "judge", 40, 5)
    # a prompt of 100; the judge's 40 are growth, and its episode may have another answer of 5
    assert contexts.expected(shares_prefixes=False) == (145, 145.0)
    contexts.ended(one)
    assert (contexts.leases, contexts.expected(shares_prefixes=False)) == (0, (0, None))


def test_what_was_not_begun_is_not_counted():
    contexts = ContextTokens()
    contexts.note("held-out", "solver", 100, 50)
    contexts.ended("held-out")
    contexts.end(7)
    assert contexts.expected(shares_prefixes=False) == (0, None)
