"""Which tokens SGLang kept of each that it drew: asked for, read, and recorded with log-probs among them."""

from dataclasses import replace

import numpy as np
import pytest

from actors.engines.base import GenerationRequest, Sampling
from actors.engines.fleet.engine_admin import attached_builds
from actors.engines.sglang.client.answers import Streamed, read_answer
from actors.engines.sglang.client.request_bodies import request_body
from actors.policy.cut_off_sampling import told_by
from actors.settings.actors import SamplingConfig
from bus.config import MOST_KEPT
from bus.errors import ConfigError, EngineError
from tests.actors.engines.sglang.streamed_pieces import END, piece
from tests.actors.sglang_stand_in import answer

CUT = GenerationRequest("r", [1], Sampling(top_p=0.9, keep_masks=True))
TOLD = {
    "output_token_sampling_mask": [[9, 5], [6], [7, 5, 30]],
    "output_token_sampling_logprobs": [-0.25, 0.0, -1.5],
}


def asked(**sampling) -> tuple[bool, int]:
    """Whether kept tokens are asked for, and how many are kept at most."""
    request = replace(CUT, sampling=Sampling(**sampling))
    body = request_body(request, rid="r", salt="")
    return body.get("return_sampling_mask", False), body["sampling_params"]["top_k"]


def test_kept_tokens_are_asked_for_where_some_are_cut_off_and_there_are_no_more_than_can_be_recorded():
    assert asked(top_p=0.9, keep_masks=True) == (True, MOST_KEPT)
    assert asked(top_k=20, keep_masks=True) == (True, 20)
    assert asked(min_p=0.1, keep_masks=True) == (True, MOST_KEPT)
    assert asked(top_p=0.9) == asked(keep_masks=True) == (False, -1)
    assert asked(top_p=0.9, keep_masks=True, temperature=0.0) == (False, -1)  # the likeliest token is drawn


def test_an_answer_has_kept_sets_and_log_probs_among_them():
    found = read_answer(answer(**TOLD), CUT)
    assert found.kept is not None
    assert found.kept.counts.tolist() == [2, 1, 3]
    assert found.kept.token_ids.tolist() == [5, 9, 6, 5, 7, 30]
    assert found.logprobs.tolist() == [-0.25, 0.0, -1.5]
    assert read_answer(answer(**TOLD), replace(CUT, sampling=Sampling())).kept is None


def test_a_set_that_ties_make_too_large_is_not_recorded_and_its_token_has_the_log_prob_of_all():
    large = [*range(MOST_KEPT + 1)]
    found = read_answer(answer(**TOLD | {"output_token_sampling_mask": [[9, 5], large, [7, 5, 30]]}), CUT)
    assert found.kept is not None
    assert found.kept.counts.tolist() == [2, 0, 3]
    assert found.logprobs.tolist() == [-0.25, -1.5, -1.5]  # the second is that of all tokens


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({}, "with 0 sets of kept tokens .* needs an SGLang that returns sampling masks"),
        ({"output_token_sampling_mask": [[9, 5], [6]]}, "3 tokens came with 2 sets"),
        ({"output_token_sampling_mask": [[9, 5], [8], [7]]}, "token 1 of 3, 6, has the log-prob"),
        ({"output_token_sampling_logprobs": [-0.25, None, -1.5]}, "log-prob None among 1 kept"),
        ({"output_token_sampling_logprobs": [-0.25, 0.5, -1.5]}, "log-prob 0.5 among 1 kept"),
        ({"output_token_sampling_mask": [[5, 9], [6, -1], [7, 30, 5]]}, r"among 2 kept tokens \[-1, 6\]"),
    ],
)
def test_sets_that_cannot_be_are_an_error(told, says):
    meta = {**TOLD, **told} if told else {}
    with pytest.raises(EngineError, match=says):
        read_answer(answer(**meta), CUT)


def told(begin: int, end: int) -> dict[str, list]:
    """What 0.5.23 says of tokens 100 + begin to 100 + end: each was one of two."""
    return {
        "output_token_sampling_mask": [[100 + token, 7] for token in range(begin, end)],
        "output_token_sampling_logprobs": [-token / 100 for token in range(begin, end)],
    }


@pytest.mark.parametrize(
    "pieces",
    [
        [piece(0, 1, **told(0, 1)), piece(1, 4, **told(1, 4)), piece(4, 6, **END, **told(4, 6))],
        [piece(0, 1, **told(0, 1)), piece(0, 6, **END, **told(0, 6))],  # which repeats what came before
        [piece(0, 6, **told(0, 6)), piece(5, 6, **END, **told(0, 6))],  # and one that repeats all sets
    ],
)
def test_pieces_of_a_stream_have_the_sets_of_their_tokens(pieces):
    streamed = Streamed(CUT, 7)
    for one in pieces:
        streamed.add(one)
    for found in (streamed.generation(), streamed.kept()):
        assert found.kept is not None
        assert found.kept.padded().tolist() == [[7, 100 + token] for token in range(6)]
        np.testing.assert_allclose(found.logprobs, -np.arange(6) / 100, rtol=1e-6)


def test_of_a_stream_that_breaks_off_the_sets_are_kept_that_came():
    streamed = Streamed(CUT, 7)
    assert streamed.kept().kept is not None
    streamed.add(piece(0, 2, **told(0, 2)))
    streamed.weights_change()
    streamed.add(piece(2, 3, **told(2, 3)))
    kept = streamed.kept().kept
    assert kept is not None
    assert kept.counts.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("kept_sets", "speculation", "why"),
    [
        ({}, None, r"is SGLang 0\.5\.23, which does not tell .*use one that has --sampling-mask-max-tokens"),
        ({"sampling_mask_max_tokens": 64}, None, "more than 64 tokens: start it with --sampling-mask-max-"),
        ({"sampling_mask_max_tokens": 4096}, "EAGLE", "speculative_algorithm='EAGLE': start it without"),
        ({"sampling_mask_max_tokens": 4096}, "DFLASH", ""),
    ],
)
async def test_a_running_server_that_cannot_tell_what_it_kept_is_refused_before_it_is_asked(
    stand_in, attach, tmp_path, kept_sets, speculation, why
):
    stand_in.kept_sets, stand_in.speculation = kept_sets, speculation
    await attach().start()  # where nobody wants to know
    config = told_by(attach()._config, SamplingConfig(top_p=0.9, keep_masks=True))
    [build] = attached_builds(config, tmp_path / "model").values()
    engine = await build()
    asked = len(stand_in.asked)
    if why:
        with pytest.raises(ConfigError, match=rf"keep_masks=true: the server at {stand_in.url} .*{why}"):
            await engine.start()
    else:
        await engine.start()
    assert len(stand_in.asked) == asked + 1, "the token by which it shows what it can"
    await engine.close()
