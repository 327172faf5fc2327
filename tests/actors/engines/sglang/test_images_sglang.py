"""Images at a real SGLang server on this machine's CPU (`make test-sglang`), against transformers."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForImageTextToText

from actors.engines.base import NOTHING, Generation, GenerationRequest, Sampling
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.fleet.engine_state import ScoredTokens
from actors.engines.sglang.engine import SglangEngine
from actors.settings.engines import EmbeddedEngineConfig, SglangEngineConfig
from actors.weights.probe import ProbeCheck
from bus.errors import RequestRefusedError
from bus.messages import BlobRef, PolicyManifest, Probe
from learner.publication.probe import probe_samples, probe_tokens
from storage.images.reader import ImageReader
from tests.actors.sglang_served import CONFIG, noted, own_server
from tests.actors.shown import asked, recomputed
from tests.pictures import image_part, picture, vision_directory

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.nightly,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(420),
]
NEAR = 2e-5
BLOB = BlobRef(subject="blob", chunks=1, size_bytes=1, digest="")
ASKING = {"type": "text", "text": "how many?"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return vision_directory(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def policies(directory, tmp_path_factory):
    """Two policies of one shape, whose towers differ and whose language models do."""
    other = vision_directory(tmp_path_factory.mktemp("other") / "model", seed=1)
    return [AutoModelForImageTextToText.from_pretrained(one).eval() for one in (directory, other)]


def published(policy) -> dict[str, torch.Tensor]:
    """Its tensors as the learner publishes them."""
    return {name: tensor for name, tensor in policy.state_dict().items() if name != "lm_head.weight"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(directory, tmp_path_factory) -> AsyncIterator[SglangEngine]:
    async with own_server(directory, tmp_path_factory.mktemp("log")) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared, policies) -> SglangEngine:
    """The shared engine with the first policy as version 0."""
    await shared.load_weights(published(policies[0]), 0)
    return shared


async def test_log_probs_are_those_of_transformers_for_prompts_with_images_and_without(
    engine, directory, policies
):
    one, other = image_part(picture(16, 24)), image_part(picture(40, 16, seed=1, kind="JPEG"))
    resized = image_part(picture(37, 53, seed=2))
    requests = [
        asked(directory, "one", one, ASKING),
        asked(directory, "sibling", one, ASKING),
        asked(directory, "two", one, ASKING, other),
        asked(directory, "resized", resized, ASKING),
        asked(directory, "again", other, other, ASKING, new=5),
        asked(directory, "none", ASKING),
    ]
    found = await asyncio.gather(*map(engine.generate, requests))
    for request, generation in zip(requests, found, strict=True):
        wanted = recomputed(policies[0], directory, request, generation)
        np.testing.assert_allclose(generation.logprobs, wanted, atol=NEAR)
        assert set(generation.policy_versions.tolist()) == {0}


async def test_the_embedded_engine_gives_the_tokens_the_same_log_probs(engine, directory, policies):
    request = asked(directory, "greedy", image_part(picture(37, 53, seed=3)), ASKING, new=12)
    request = replace(request, sampling=replace(request.sampling, temperature=0.0))
    own = EmbeddedEngine.from_directory(
        directory, EmbeddedEngineConfig(dtype="float32", threads=1, seed=0), policy_version=0
    )
    await own.start()
    ours, theirs = await own.generate(request), await engine.generate(request)
    await own.close()
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=NEAR)


async def test_later_turns_show_the_same_images_and_new_ones(engine, directory, policies):
    first = asked(directory, "turn-0", image_part(picture()), ASKING)
    answer = await engine.generate(first)
    others = [
        token for token in answer.token_ids.tolist() if token not in ImageReader.of(directory).shown_ids
    ]
    answered = [*first.token_ids, *others]
    tool = asked(directory, "turn-1", image_part(picture(8, 8, seed=4)), ASKING)
    tokens = [*answered, *tool.token_ids]
    images = (*first.images, *(image.moved(len(answered)) for image in tool.images))
    second = replace(tool, token_ids=tokens, images=images)
    generation = await engine.generate(second)
    wanted = recomputed(policies[0], directory, second, generation)
    np.testing.assert_allclose(generation.logprobs, wanted, atol=NEAR)


def pad(request) -> int:
    return request.token_ids[request.images[0].start]


async def test_prompts_of_the_same_tokens_and_other_images_share_no_prefix(engine, directory, policies):
    requests = [asked(directory, str(n), image_part(picture(seed=n)), ASKING) for n in range(5, 8)]
    requests.append(replace(requests[0], request_id="again"))  # after others of its tokens
    assert len({tuple(request.token_ids) for request in requests}) == 1
    likeliest = []
    for request in requests:
        generation = await engine.generate(request)
        wanted = recomputed(policies[0], directory, request, generation)
        np.testing.assert_allclose(generation.logprobs, wanted, atol=NEAR)
        greedy = replace(request, request_id="greedy", sampling=replace(request.sampling, temperature=0.0))
        likeliest.append((await engine.generate(greedy)).logprobs)
    np.testing.assert_allclose(likeliest[0], likeliest[3], atol=NEAR)
    first = [logprobs[0] for logprobs in likeliest[:3]]
    assert min(np.diff(sorted(first))) > 100 * NEAR


@pytest.mark.parametrize("update", ["disk", "tensor"])
async def test_an_update_changes_the_tower_and_the_text(engine, directory, policies, update, monkeypatch):
    monkeypatch.setattr(engine, "_config", engine._config.model_copy(update={"update": update}))
    request = asked(directory, "seen", image_part(picture(seed=9)), ASKING)
    await engine.generate(request)  # what the tower made of it, the server keeps
    before = await engine.checksums()
    first, second = map(published, policies)
    towers = {name: second[name] for name in second if ".visual." in name}
    await engine.load_weights(towers, 1)
    partly = await engine.checksums()
    changed = {name for name in before if partly[name] != before[name]}
    assert {name.split(".")[0] for name in changed} == {"visual"}
    mixed = AutoModelForImageTextToText.from_pretrained(directory).eval()
    mixed.load_state_dict({**policies[0].state_dict(), **towers})
    await check(engine, mixed, directory, replace(request, request_id="tower"), version=1)
    await engine.load_weights(second, 2)
    changed = {name for name in before if (await engine.checksums())[name] != before[name]}
    assert {name.split(".")[0] for name in changed} == {"visual", "model"}
    await check(engine, policies[1], directory, replace(request, request_id="whole"), version=2)
    await engine.load_weights(first, 3)
    assert await engine.checksums() == before


async def test_an_image_that_an_engine_before_showed_at_the_same_version_is_seen_anew(
    engine, directory, policies, tmp_path
):
    request = asked(directory, "seen", image_part(picture(seed=11)), ASKING)
    for policy in reversed(policies):  # the server ends with the weights that the shared engine has given it
        later = SglangEngine(directory, SglangEngineConfig(**CONFIG, url=engine.url), tmp_path / "unused.log")
        await later.start()
        await later.load_weights(published(policy), 0)
        await check(later, policy, directory, request, version=0)
        await later.close()


async def test_the_probe_is_scored_as_transformers_does(engine, policies):
    tokens = probe_tokens(policies[0].config)  # random ones, those that stand for patches among them
    found = await engine.score(tokens.tolist())
    language = policies[0].get_decoder()
    with torch.inference_mode():
        hidden = language(input_ids=torch.from_numpy(tokens).long(), use_cache=False).last_hidden_state
        logits = policies[0].get_output_embeddings()(hidden)[:, :-1]
    labels = torch.from_numpy(tokens).long()[:, 1:]
    wanted = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0].numpy()
    np.testing.assert_allclose(found, wanted, atol=NEAR)


class Alone:
    """The engine as a fleet of one."""

    def __init__(self, engine: SglangEngine) -> None:
        self.engine = engine

    async def score(self, sequences, images=()):
        return {"one": ScoredTokens(self.engine.policy_version, await self.engine.score(sequences, images))}


def announced(policy, directory, version: int) -> PolicyManifest:
    """A version with what transformers says of the probe, as the learner announces it."""
    samples = probe_samples(policy.config, ImageReader.of(directory))
    nats = []
    for sample in samples:
        first = GenerationRequest("probe", sample.token_ids[:1].tolist(), Sampling(), images=sample.images)
        others = Generation(sample.token_ids[1:], NOTHING.logprobs, NOTHING.policy_versions, "length")
        nats.append(recomputed(policy, directory, first, others)[sample.loss_mask[1:]])
    probe = Probe(
        token_ids=tuple(tuple(sample.token_ids.tolist()) for sample in samples),
        logprobs=tuple(tuple(found.tolist()) for found in nats),
        images=tuple(sample.images for sample in samples),
    )
    return PolicyManifest(
        policy_version=version, incarnation="one", snapshot=BLOB, model=BLOB, stage="rl", probe=probe
    )


async def test_the_probe_finds_a_tower_that_was_not_updated(engine, directory, policies):
    check = ProbeCheck(Alone(engine), bound_nats=0.05)
    check.loaded(announced(policies[0], directory, 0))
    await check.check()
    assert check.alarms == {}
    assert 0 < check.nats["one"] < NEAR
    first, second = map(published, policies)
    towers = {name: tensor for name, tensor in second.items() if ".visual." in name}
    mixed = AutoModelForImageTextToText.from_pretrained(directory).eval()
    mixed.load_state_dict({**policies[0].state_dict(), **towers})
    name = "model.language_model.norm.weight"
    await engine.load_weights({name: first[name]}, 1)  # what it is sent leaves the tower out
    check.loaded(announced(mixed, directory, 1))
    await check.check()
    assert check.alarms == {"one": "one says that it has version 1, but it sees images as version 0 did"}
    await engine.load_weights(towers, 1)
    await check.check()
    assert check.alarms == {}


async def test_elements_that_changed_are_written_into_both_towers(engine, directory, policies, monkeypatch):
    torch.manual_seed(0)
    state, ways = published(policies[0]), []
    monkeypatch.setattr(engine._client, "load_changes", noted(engine._client.load_changes, ways, "changes"))
    for version in (1, 2):
        state = {
            name: torch.where(torch.rand(tensor.shape) < 0.05, tensor * 1.5 + 0.1, tensor)
            for name, tensor in state.items()
        }
        await engine.load_weights(state, version)
    assert ways == ["changes"] * 2
    moved = AutoModelForImageTextToText.from_pretrained(directory).eval()
    moved.load_state_dict({**state, "lm_head.weight": state["model.language_model.embed_tokens.weight"]})
    request = asked(directory, "moved", image_part(picture(seed=9)), ASKING)
    await check(engine, moved, directory, request, version=2)


async def check(engine, policy, directory, request, *, version):
    generation = await engine.generate(request)
    assert set(generation.policy_versions.tolist()) == {version}
    wanted = recomputed(policy, directory, request, generation)
    np.testing.assert_allclose(generation.logprobs, wanted, atol=NEAR)


async def test_a_token_of_an_image_that_is_none_goes_to_the_server_in_texts_alone(
    engine, directory, policies
):
    request = asked(directory, "sampled", image_part(picture()), ASKING)
    more = replace(request, token_ids=[*request.token_ids, pad(request)])
    with pytest.raises(RequestRefusedError, match=r"has 1 tokens beside .* SGLang takes each for an image"):
        await engine.generate(more)
    await check(engine, policies[0], directory, replace(more, images=()), version=0)


async def test_a_prompt_of_which_the_server_makes_other_tokens_is_refused(engine, directory, monkeypatch):
    request = asked(directory, "other", image_part(picture(16, 24)), ASKING)
    monkeypatch.setattr(engine._images._reader, "resized", lambda image: picture(8, 8))
    request = replace(request, images=(request.images[0]._replace(digest="another"),))
    with pytest.raises(RequestRefusedError, match="SGLang reads 12 tokens, and with its images they are 17"):
        await engine.generate(request)
