"""Which experts each token went to: read from the engine, joined over interruptions and turns, sent whole."""

import base64
import json
from dataclasses import replace

import numpy as np
import pytest

from actors.engines.base import NOTHING, Sampling
from actors.engines.expert_routing import Routing
from actors.engines.fleet.pending_request import PendingRequest
from actors.engines.sglang.client.answers import read_answer
from actors.engines.sglang.client.request_bodies import request_body
from actors.engines.sglang.client.weight_labels import weights_label
from actors.engines.sglang.server.settings import server_settings
from actors.episodes.episode import Episode
from actors.policy.policy import Policy
from actors.rollouts.group import Group
from actors.settings.actors import ActorsConfig
from bus.codec import decode, encode
from bus.errors import ConfigError, EngineError, SchemaError
from bus.trajectory import Trajectory, TrajectoryBatch
from tests.actors.paced_engine import PacedEngine, Run, experts_of
from tests.actors.tiny import request
from tests.actors.virtual_time import run_virtually
from tests.factories import make_lease, make_trajectory

ROUTING = Routing(layers=3, per_token=2, experts=8)


def reported(tokens: int) -> tuple[np.ndarray, str]:
    """The experts of so many tokens, and how a server writes them."""
    experts = np.random.default_rng(tokens).integers(0, 8, (tokens, 3, 2), np.int32)
    return experts, base64.b64encode(experts.tobytes()).decode()


def answer(routed: str | None, kind: str = "length") -> dict[str, object]:
    meta = {
        "finish_reason": {"type": kind},
        "output_token_logprobs": [[-0.5, 5, None], [-1.5, 6, None]],
        "weight_version": weights_label(4),
        "routed_experts": routed,
    }
    return {"output_ids": [5, 6], "meta_info": meta}


def asked(experts_from: int | None):
    made = request("r", [1, 2, 3])
    return made.__class__(made.request_id, made.token_ids, made.sampling, experts_from)


@pytest.mark.parametrize("experts_from", [0, 2])
@pytest.mark.parametrize("server_knows_where_to_start", [True, False])
def test_experts_of_all_tokens_but_the_last_are_read(experts_from, server_knows_where_to_start):
    experts, text = reported(4 - experts_from if server_knows_where_to_start else 4)
    found = read_answer(answer(text), asked(experts_from), ROUTING).routed_experts
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, experts[-(4 - experts_from) :])


def test_a_request_names_where_its_experts_begin_and_is_silent_without():
    body = request_body(asked(2), rid="r", salt="s")
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 2)
    assert request_body(replace(asked(2), lease_version=7), rid="r", salt="s")["priority"] == 7
    assert "return_routed_experts" not in request_body(asked(None), rid="r", salt="s")
    assert read_answer(answer(reported(4)[1]), asked(None), ROUTING).routed_experts is None


def test_a_request_that_was_aborted_as_it_waited_has_none():
    assert read_answer(answer(None, "abort"), asked(0), ROUTING).routed_experts is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "start the server with --enable-return-routed-experts"),
        (reported(3)[1], "experts of 3 tokens came where those of 4 were asked for"),
        (base64.b64encode(bytes(4 * 7)).decode(), "not 2 in each of 3 layers"),
        ("no base64!", "not 2 in each of 3 layers"),
        (base64.b64encode(np.full(24, 8, np.int32).tobytes()).decode(), "expert 8 of a model that has 8"),
        (base64.b64encode(np.full(24, -1, np.int32).tobytes()).decode(), "expert -1"),
    ],
)
def test_experts_that_cannot_be_the_models_are_an_error(text, says):
    with pytest.raises(EngineError, match=f"request r: .*{says}"):
        read_answer(answer(text), asked(0), ROUTING)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "qwen3", "num_hidden_layers": 2}, "a qwen3, has no experts"),
        ({"num_experts_per_tok": 8, "n_routed_experts": 70_000}, "has 70000 experts a layer"),
    ],
)
def test_models_whose_experts_cannot_be_recorded_are_refused(config, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=says):
        Routing.of_model(tmp_path)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_the_shape_is_that_of_the_models_config(name, tmp_path):
    config = {"num_hidden_layers": 3, "num_experts_per_tok": 2, name: 256}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert Routing.of_model(tmp_path) == Routing(layers=3, per_token=2, experts=256)


def test_a_server_of_our_own_is_started_to_return_them(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"]}))
    for wanted in (True, False):
        config = ActorsConfig(engine={"type": "sglang", "routed_experts": wanted}).engine
        settings = server_settings(config, tmp_path, host="h", port=1, first_gpu=0)
        assert settings.get("enable_return_routed_experts", False) is wanted


def test_numbers_above_255_are_read_and_stored_as_two_bytes():
    wide = Routing(layers=3, per_token=2, experts=384)
    experts = np.random.default_rng(0).integers(0, 384, (4, 3, 2), np.int32)
    found = wide.read(base64.b64encode(experts.tobytes()).decode(), 4)
    assert found.dtype == np.uint16
    trajectory = replace(
        make_trajectory(0, 0, tokens=5),
        routed_experts=found.tobytes(), moe_layers=3, experts_per_token=2,
    )  # fmt: skip
    trajectory.check()
    np.testing.assert_array_equal(decode(encode(trajectory), Trajectory).experts, experts)
    with pytest.raises(SchemaError, match="47 bytes of routed experts for 5 tokens"):
        replace(trajectory, routed_experts=trajectory.routed_experts[:-1]).check()


def test_pieces_are_joined_without_counting_a_token_twice():
    pending = PendingRequest(0, asked(1))

    def sample(new: int, reason: str, *, routed: bool) -> None:
        rest = pending.rest("rest")
        run = Run(rest, tokens=[50 + pending.sampled + n for n in range(new)], versions=[0] * new)
        pending.pieces.append(run.generation(reason, routed=routed))

    sample(2, "abort", routed=True)
    sample(1, "abort", routed=False)  # an engine that died
    pending.pieces.append(NOTHING)
    sample(2, "abort", routed=True)
    sample(7, "length", routed=True)
    found = pending.generation()
    whole = [1, 2, 3, *found.token_ids.tolist()]
    assert len(whole) == 15
    np.testing.assert_array_equal(found.routed_experts, experts_of(whole)[1:])


def recorded(tokenizer, *, turns: int, routed_experts: bool = True):
    """What is recorded of so many turns of a chat in tokens."""

    found = []

    async def chat():
        engine = PacedEngine(version=0)
        policy = Policy(engine, tokenizer, Sampling(max_new_tokens=4), routed_experts=routed_experts)
        tokens = [3, 4, 5]
        for turn in range(turns):
            completion = await policy.generate(tokens)
            tokens = [*tokens, *completion.token_ids.tolist(), 7 + turn, 8]
        found.extend(policy.trajectories(1.0))
        found.append([asked.experts_from for asked in engine.requests])

    run_virtually(chat())
    return found


def test_each_token_of_a_trajectory_has_its_row_and_is_asked_for_once(tokenizer):
    trajectory, asked_from = recorded(tokenizer, turns=3)
    assert asked_from == [0, 6, 12]
    expected = experts_of(trajectory.token_ids.tolist())
    np.testing.assert_array_equal(trajectory.routed_experts, expected)
    assert len(expected) == len(trajectory.token_ids) - 1


def test_nothing_is_asked_for_unless_configured(tokenizer):
    trajectory, asked_from = recorded(tokenizer, turns=1, routed_experts=False)
    assert (trajectory.routed_experts, asked_from) == (None, [None])


def test_experts_travel_in_the_message(tokenizer):
    routed, _ = recorded(tokenizer, turns=2)
    plain, _ = recorded(tokenizer, turns=1, routed_experts=False)
    group = Group(make_lease(samples=2), 1, "actor")
    group.episodes.update({0: Episode((routed,)), 1: Episode((plain,))})
    sent = [decode(encode(batch), TrajectoryBatch).trajectories for _, batch, _ in group.unsent()]
    [first], [second] = sent  # each by itself, for they are large
    assert (first.moe_layers, first.experts_per_token, second.routed_experts) == (1, 2, b"")
    np.testing.assert_array_equal(first.experts, routed.routed_experts)
    assert second.experts is None
