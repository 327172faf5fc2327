"""An answer has the room that its context leaves, whoever knows how much that is, and when."""

import pytest

from actors.engines.base import Sampling
from actors.engines.fleet.fleet import Fleet
from actors.policy.policy import Policy
from actors.settings.fleet import FleetConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ContextFullError, RequestRefusedError
from tests.actors.gateway.served import TOKENIZER, script

PROMPT = TOKENIZER.encode("abc", add_special_tokens=False)


class Limited(ScriptedEngine):
    """An engine of contexts of 9 tokens, which refuses what is longer."""

    def __init__(self, tells: str) -> None:
        super().__init__(script(lambda _: "x" * 40))
        self.tells = tells

    @property
    def longest_context(self) -> int | None:
        known = self.tells == "always" or (self.tells == "later" and bool(self.requests))
        return 9 if known else None

    async def generate(self, request):
        if len(request.token_ids) + request.sampling.max_new_tokens > 9:
            self.requests.append(request)
            raise RequestRefusedError("it does not fit")
        return await super().generate(request)


@pytest.mark.parametrize(("tells", "asked"), [("always", [6]), ("later", [30, 6])])
async def test_an_answer_is_as_long_as_fits(tells, asked):
    engine = Limited(tells)
    answer = await Policy(engine, TOKENIZER, Sampling(max_new_tokens=30)).generate(PROMPT)
    assert [request.sampling.max_new_tokens for request in engine.requests] == asked
    assert (len(answer.token_ids), answer.finish_reason) == (6, "length")


@pytest.mark.parametrize("tells", ["always", "later"])
async def test_a_prompt_that_leaves_no_room_is_refused_with_its_tokens(tells):
    with pytest.raises(ContextFullError) as refused:
        await Policy(Limited(tells), TOKENIZER, Sampling()).generate([5] * 9)
    assert (refused.value.tokens, refused.value.longest) == (9, 9)


async def test_an_engine_that_never_tells_refuses_in_its_own_words():
    with pytest.raises(RequestRefusedError, match="it does not fit"):
        await Policy(Limited("never"), TOKENIZER, Sampling()).generate(PROMPT)


async def test_a_fleet_has_the_longest_context_of_its_engines_once_all_of_them_tell():
    async def built(tells: str) -> Limited:
        return Limited(tells)

    one = Fleet({"a": lambda: built("always")}, FleetConfig())
    both = Fleet({"a": lambda: built("always"), "b": lambda: built("never")}, FleetConfig())
    assert one.longest_context is None  # none serves yet
    for fleet, longest in ((one, 9), (both, None)):
        await fleet.start()
        await fleet.load_weights({}, 1)
        assert fleet.longest_context == longest
        await fleet.close()
