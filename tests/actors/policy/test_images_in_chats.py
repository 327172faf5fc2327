"""Images in chats: the tokens that stand for them, and which strand they continue."""

import aiohttp
import pytest
from transformers import AutoTokenizer

from actors.engines.base import ChatReply, Sampling
from actors.episodes.episode import Episode
from actors.gateway.server import Gateway
from actors.policy.messages import MessagesError
from actors.policy.policy import Policy
from actors.rollouts import group
from actors.settings.gateway import GatewayConfig
from benchmarks.scripted_engine import ScriptedEngine
from storage.images.chat import ImageChat
from storage.images.encoded import decoded
from tests.factories import make_lease
from tests.pictures import image_part, picture, vision_directory

RED, BLUE, SMALL = picture(16, 24), picture(16, 24, seed=1), picture(8, 8, seed=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return vision_directory(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture
def policy(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    engine = ScriptedEngine(lambda _: tokenizer.encode("3<|end|>"), policy_version=2)
    images = ImageChat.of(directory, tokenizer)
    return Policy(engine, tokenizer, Sampling(max_new_tokens=8), images=images)


def user(*parts):
    return {"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}


def places(images):
    return [(image.start, image.rows, image.columns) for image in images]


async def test_a_prompt_has_a_token_for_each_merged_patch_and_the_engine_gets_the_image(policy, directory):
    await policy.chat([user(image_part(RED))])
    [trajectory] = policy.trajectories(1.0)
    decoded = AutoTokenizer.from_pretrained(directory).decode(trajectory.token_ids)
    wanted = f"<|user|><|vision_start|>{6 * '<|image_pad|>'}<|vision_end|>?<|assistant|>3<|end|>"
    assert decoded == wanted
    assert places(trajectory.images) == [(2, 2, 3)]
    assert not trajectory.loss_mask[: -len("3") - 1].any()
    [request] = policy._engine.requests
    assert request.images == trajectory.images
    assert request.images[0].data == RED


async def test_an_image_of_a_tool_grows_the_strand_that_it_answers(policy):
    chat = [user(image_part(RED))]
    chat += [(await policy.chat(chat)).message]
    chat += [{"role": "tool", "content": [image_part(SMALL)], "tool_call_id": "c"}]
    await policy.chat(chat)
    [trajectory] = policy.trajectories(1.0)
    assert len(trajectory.turns) == 2
    begin = trajectory.turns[0].stop + 2  # after the roles' token and the one that begins an image
    assert places(trajectory.images) == [(2, 2, 3), (begin, 1, 1)]
    assert [image.data for image in trajectory.images] == [RED, SMALL]
    assert policy._engine.requests[1].images == trajectory.images


async def test_another_image_of_the_same_size_is_another_chat(policy):
    first = [user(image_part(RED))]
    answer = (await policy.chat(first)).message
    await policy.chat([user(image_part(BLUE)), answer, user()])
    one, other = policy.trajectories(1.0)
    assert one.token_ids.tolist() == other.token_ids[: len(one.token_ids)].tolist()
    assert [image.data for image in other.images] == [BLUE]
    assert other.fork is None
    await policy.chat([user(image_part(RED)), answer, user(image_part(SMALL))])
    assert len(policy.trajectories(1.0)) == 2  # the first one goes on


async def test_a_fork_shares_the_tokens_before_an_image_that_differs(policy):
    beginning = [user(image_part(RED))]
    beginning += [(await policy.chat(beginning)).message]
    await policy.chat([*beginning, user(image_part(RED))])
    await policy.chat([*beginning, user(image_part(BLUE))])
    one, other = policy.trajectories(1.0)
    assert other.fork.token == one.images[1].start


async def test_siblings_read_their_image_once(policy, monkeypatch):
    read = []
    monkeypatch.setattr("storage.images.reader.decoded", lambda data: read.append(data) or decoded(data))
    part = image_part(RED)
    for name in "abc":
        await policy.fresh(name).chat([user(part)])
    assert len(read) == 1


async def test_tokens_that_go_on_without_messages_keep_the_images(policy):
    completion = await policy.chat([user(image_part(RED))])
    await policy.go_on(completion, " wait, ")
    [trajectory] = policy.trajectories(1.0)
    assert places(trajectory.images) == [(2, 2, 3)]
    await policy.generate([*trajectory.token_ids.tolist(), 7])
    [trajectory] = policy.trajectories(1.0)
    assert places(policy._engine.requests[-1].images) == [(2, 2, 3)]


MARKED = "see <|image_pad|>"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "system", "content": MARKED},
        {"role": "user", "content": [{"type": "text", "text": MARKED}]},
        {"role": "tool", "content": MARKED, "tool_call_id": "c"},
        {"role": "tool", "content": "", "tool_call_id": "c", "name": MARKED},
        {"role": "assistant", "content": "", "reasoning": MARKED},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": '{"at": "<|image_pad|>"}'}}],
        },
    ],
)
async def test_a_text_is_taken_for_an_image_nowhere_in_a_message(policy, message):
    with pytest.raises(MessagesError, match=r"message 1: it has <\|image_pad\|> in its text"):
        await policy.chat([user(image_part(RED)), message, user()])


async def test_a_text_is_taken_for_an_image_in_no_tool(policy):
    tool = {"type": "function", "function": {"name": "look", "description": MARKED}}
    with pytest.raises(MessagesError, match=r"tool look: it has <\|image_pad\|> in its text"):
        await policy.chat([user()], tools=[tool])


class Answering(ScriptedEngine):
    """An engine of which only texts are known."""

    async def chat(self, messages, tools, sampling):
        return ChatReply("3", None, (), "stop")


async def test_an_answer_of_which_texts_alone_are_known_is_recorded_with_its_images(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    images = ImageChat.of(directory, tokenizer)
    policy = Policy(Answering(lambda _: []), tokenizer, Sampling(max_new_tokens=8), images=images)
    await policy.chat([user(image_part(RED))])
    [trajectory] = policy.trajectories(1.0)
    assert places(trajectory.images) == [(2, 2, 3)]
    assert trajectory.images[0].data == RED
    shown = trajectory.token_ids == images.reader.token_ids[1]
    assert shown.nonzero()[0].tolist() == list(range(2, 8))


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (user({"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}), "give it as a data URI"),
        ({"role": "user", "content": "see <|image_pad|>"}, r"message 0: it has <\|image_pad\|> in its text"),
        ({"role": "assistant", "content": [image_part(RED)]}, "policies answer in text"),
        (
            user({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
            "no image that can be",
        ),
    ],
)
async def test_an_image_that_cannot_be_shown_is_refused_by_its_message(policy, message, complaint):
    with pytest.raises(MessagesError, match=complaint):
        await policy.chat([message])
    assert policy.trajectories(0.0) == ()


@pytest.mark.parametrize("allowed", [1 << 20, len(RED)])
async def test_siblings_with_many_images_are_messages_of_their_own(policy, monkeypatch, allowed):
    monkeypatch.setattr(group, "MANY_IMAGES_BYTES", allowed)
    gathered = group.Group(make_lease(samples=2), 1, "tester")
    for sample, shown in enumerate((RED, BLUE)):
        rollout = policy.fresh(str(sample))
        await rollout.chat([user(image_part(RED)), user(image_part(shown))])
        gathered.add(sample, Episode(rollout.trajectories(1.0)))
    found = [[len(one.images) for one in batch.whole] for _, batch, _ in gathered.unsent()]
    assert found == ([[2, 2]] if allowed > len(RED) else [[2], [2]])


DATA = image_part(RED)["image_url"]["url"].partition(",")[2]
GOOGLES = {"inlineData": {"mimeType": "image/png", "data": DATA}}
ANTHROPICS = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
RESPONSES = {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}"}
BY_API = {
    "/v1/chat/completions": {"messages": [user(image_part(RED))]},
    "/v1/messages": {"messages": [user(ANTHROPICS)], "max_tokens": 8},
    "/v1/responses": {"input": [user(RESPONSES)]},
    "/v1beta/models/m:generateContent": {"contents": [{"parts": [GOOGLES, {"text": "?"}]}]},
}


async def test_agents_of_each_api_show_the_same_image(policy):
    gateway = Gateway(GatewayConfig())
    await gateway.start()
    async with aiohttp.ClientSession() as http, gateway.session(policy, "t") as session:
        for path, body in BY_API.items():
            async with http.post(gateway.url_of(session) + path, json=body) as answer:
                assert answer.status == 200, await answer.text()
    await gateway.close()
    first, *others = policy._engine.requests
    assert len(first.images) == 1
    assert [(one.token_ids, one.images) for one in others] == [(first.token_ids, first.images)] * 3
