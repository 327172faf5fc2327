"""Tokens that a server hands out as it draws them: whole at the end, and kept when the server dies."""

import asyncio
import json
from collections.abc import AsyncIterator

import numpy as np
import pytest

from actors.engines.base import InterruptedGenerationError
from actors.engines.sglang.client.answers import Streamed, read_events
from actors.engines.sglang.engine import SglangEngine
from actors.engines.sglang.server.settings import server_settings
from actors.settings.engines import SglangEngineConfig
from bus.errors import EngineError, RequestRefusedError
from tests.actors.engines.sglang.streamed_pieces import END, piece
from tests.actors.sglang_stand_in import STATE, TIMEOUT_S, StandIn
from tests.actors.tiny import request


def streamed(*pieces) -> Streamed:
    made = Streamed(request("r", [1]), 7)
    for one in pieces:
        made.add(one)
    return made


@pytest.mark.parametrize(
    "pieces",
    [
        [piece(0, 1), piece(1, 4), piece(4, 6, **END)],
        [piece(0, 1), piece(0, 4), piece(0, 6, **END)],  # each repeats what came before
        [piece(0, 6), piece(5, 6, **END)],  # as a waiting request ends that is aborted
        [piece(0, 6, **END)],
    ],
)
def test_pieces_make_a_whole_answer_with_its_exact_versions(pieces):
    found = streamed(*pieces).generation()
    assert found.token_ids.tolist() == [100, 101, 102, 103, 104, 105]
    np.testing.assert_allclose(found.logprobs, -np.arange(6) / 10, rtol=1e-6)
    assert found.policy_versions.tolist() == [7, 7, 7, 8, 8, 8]


def test_a_waiting_request_that_is_aborted_may_repeat_all_its_logprobs():
    whole = piece(0, 6)["meta_info"]["output_token_logprobs"]
    last = piece(5, 6, finish_reason={"type": "abort"}, output_token_logprobs=whole)
    found = streamed(piece(0, 6), last).kept()
    np.testing.assert_allclose(found.logprobs, -np.arange(6) / 10, rtol=1e-6)


def test_what_came_is_kept_under_the_version_it_began_with():
    found = streamed(piece(0, 1), piece(1, 4)).kept()
    assert found.token_ids.tolist() == [100, 101, 102, 103]
    assert found.policy_versions.tolist() == [7] * 4
    assert found.finish_reason == "abort"
    assert len(streamed().kept().token_ids) == 0


def test_tokens_that_came_after_weights_changed_are_not_kept_as_their_version_is_not_known():
    made = streamed(piece(0, 1), piece(1, 4))
    made.weights_change()
    made.add(piece(4, 6))
    made.weights_change()
    assert made.kept().token_ids.tolist() == [100, 101, 102, 103]
    made.add(piece(6, 6, **END))
    assert made.generation().policy_versions.tolist() == [7, 7, 7, 8, 8, 8]


@pytest.mark.parametrize(
    "wrong",
    [
        piece(5, 6),
        {"output_ids": [1]},
        {"output_ids": [9, 9], "meta_info": piece(0, 3)["meta_info"]},
        {"output_ids": [1], "meta_info": {"completion_tokens": 0, "output_token_logprobs": []}},
        piece(4, 5, output_token_logprobs=[[None, 104, None]]),
        piece(4, 5, output_token_logprobs=[[-1.0, 105, None]]),
        piece(4, 6, output_token_logprobs=[[-1.0, 104, None]]),
        piece(4, 5, weight_version="7.another"),
    ],
)
def test_a_piece_that_does_not_follow_is_an_error_and_changes_nothing(wrong):
    made = streamed(piece(0, 4))
    said = "do not follow|not one of SGLang's|is nan|of other tokens|1 log-probs|not of this actor"
    with pytest.raises(EngineError, match=said):
        made.add(wrong)
    assert made.kept().token_ids.tolist() == [100, 101, 102, 103]


async def arriving(data: bytes, size: int) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
async def test_events_are_read_however_they_are_cut(size):
    objects = [{"n": n, "text": "data: [DONE]" * n} for n in range(4)]
    data = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in objects)
    for end in (b"data: [DONE]\n\n", b'data: {"half":'):
        assert [found async for found in read_events(arriving(data + end, size))] == objects


@pytest.mark.parametrize("data", [b"<html>", b"[" * 200_000, b"data: 7", b"data: []"])
async def test_events_that_are_no_json_objects_are_an_error(data):
    with pytest.raises(EngineError, match="where a JSON object is expected"):
        async for _ in read_events(arriving(data + b"\n\n", 100_000)):
            pass


@pytest.fixture
async def engine(tmp_path):
    """Attached to a server that streams; `engine.server` is that one."""
    server = StandIn()
    server.streams = True
    await server.start()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    config = SglangEngineConfig(url=server.url, weights_directory=tmp_path / "weights", health_timeout_s=5.0)
    engine = SglangEngine(model, config, tmp_path / "unused.log")
    engine.server = server
    await engine.start()
    await engine.load_weights(STATE, 7)
    yield engine
    server.goes_on.set()
    await engine.close()
    await server.close()


def breaks_off(engine, *pieces) -> asyncio.Task:
    """A request whose stream breaks after these pieces, when the server `goes_on`."""
    engine.server.pieces = list(pieces)
    return asyncio.create_task(engine.generate(request("r", [1], new=64)))


async def tokens_left(flight) -> list[int]:
    with pytest.raises(InterruptedGenerationError) as caught:
        await asyncio.wait_for(flight, TIMEOUT_S)
    assert set(caught.value.partial.policy_versions.tolist()) <= {7}
    return caught.value.partial.token_ids.tolist()


async def until_they_came(engine, count: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await engine.server.piece_sent.wait()
        [flight] = engine.in_progress
        while len(flight.streamed.kept().token_ids) < count:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)


async def test_tokens_of_a_stream_that_breaks_off_are_handed_out(engine):
    flight = breaks_off(engine, piece(0, 1), piece(1, 4))
    await until_they_came(engine, 4)
    engine.server.goes_on.set()
    assert await tokens_left(flight) == [100, 101, 102, 103]
    assert not engine.failure  # the server was looked at, and is well


async def test_requests_to_generate_use_a_connection_again_and_no_others_do(engine):
    engine.server.pieces, engine.server.breaks_off = [piece(0, 6, **END)], False
    engine.server.goes_on.set()
    for number in range(20):
        await engine.generate(request(f"r{number}", [1], new=6))
    await engine.load_weights(STATE, 8)
    generated, others = [], []
    for paths in engine.server.connections.values():
        (generated if "generate" in paths else others).append(paths)
    assert len(generated) <= 3
    assert sum(paths.count("generate") for paths in generated) == sum(map(len, generated)) >= 20
    assert len(others) > 3
    assert {len(paths) for paths in others} == {1}  # a server may close a kept one as an update uses it


@pytest.mark.parametrize("ends", [True, False])
async def test_a_whole_answer_counts_though_its_stream_breaks_off_behind_it_or_never_ends(engine, ends):
    flight = breaks_off(engine, piece(0, 6, **END))
    if ends:
        engine.server.goes_on.set()
    found = await asyncio.wait_for(flight, TIMEOUT_S)
    assert found.token_ids.tolist() == [100, 101, 102, 103, 104, 105]


async def test_tokens_of_a_server_that_is_killed_are_handed_out(engine):
    flight = breaks_off(engine, piece(0, 4))
    await until_they_came(engine, 4)
    await engine._fail("it ended")
    assert await tokens_left(flight) == [100, 101, 102, 103]


async def test_an_update_in_flight_leaves_the_tokens_before_it(engine):
    flight = breaks_off(engine, piece(0, 4))
    await until_they_came(engine, 4)
    await engine.load_weights(STATE, 8)
    engine.server.goes_on.set()
    assert await tokens_left(flight) == [100, 101, 102, 103]


@pytest.mark.parametrize(
    "said",
    [
        {"error": {"message": "too long", "code": 400}},
        piece(0, 0, finish_reason={"type": "abort", "status_code": 400, "message": "too long"}),
    ],
)
async def test_a_request_that_is_refused_in_its_stream_is_refused(engine, said):
    flight = breaks_off(engine, said)
    engine.server.goes_on.set()
    with pytest.raises(RequestRefusedError, match="too long"):
        await asyncio.wait_for(flight, TIMEOUT_S)


@pytest.mark.parametrize(("interval", "settings"), [(0, (None, None)), (32, (32, True))])
def test_a_server_of_our_own_streams_as_configured(interval, settings, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    config = SglangEngineConfig(stream_interval=interval)
    found = server_settings(config, tmp_path, host="h", port=1, first_gpu=0)
    assert (found.get("stream_interval"), found.get("incremental_streaming_output")) == settings
