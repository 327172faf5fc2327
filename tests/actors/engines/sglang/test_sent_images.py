"""Images on their way to a SGLang server: what a request of it says, and what is refused."""

import asyncio
import base64
import json
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from actors.engines.fleet.build import refuse_unfit_model
from actors.engines.sglang.client import sent_images
from actors.engines.sglang.client.answers import read_answer
from actors.engines.sglang.client.request_bodies import request_body
from actors.engines.sglang.client.sent_images import SentImages, as_json
from actors.engines.sglang.client.server_facts import ServerFacts
from actors.engines.sglang.client.weight_labels import weights_label
from actors.settings.engines import EmbeddedEngineConfig, SglangEngineConfig
from bus.errors import ConfigError, RequestRefusedError
from storage.images.encoded import decoded
from storage.images.reader import ImageReader
from tests.actors.shown import asked
from tests.pictures import image_part, older_vision_directory, picture, vision_directory

TEXT = {"type": "text", "text": "?"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return vision_directory(tmp_path_factory.mktemp("vision") / "model")


async def test_a_prompt_has_one_token_for_each_image_and_their_pixels_of_the_final_size(directory):
    request = asked(directory, "r", image_part(picture(37, 53)), TEXT, image_part(picture(8, 8, seed=1)))
    sent = await SentImages.of(directory).prepared(request)
    body = request_body(sent, rid="r", salt="3.1")
    start, shown, end = ImageReader.of(directory).token_ids
    text = request.token_ids[request.images[0].stop + 1]
    assert body["input_ids"] == [start, shown, end, text, start, shown, end]
    pixels = [base64.b64decode(each) for each in body["image_data"]]
    assert [decoded(each)[1].size for each in pixels] == [
        (image.columns * 8, image.rows * 8) for image in request.images
    ]
    assert [image.digest for image in sent.images] == [image.digest for image in request.images]


async def test_other_weights_get_other_bytes_of_the_same_pixels(directory):
    sent = await SentImages.of(directory).prepared(asked(directory, "r", image_part(picture()), TEXT))
    [first], [again], [second] = (
        request_body(sent, rid="r", salt=salt)["image_data"] for salt in ("1.0", "1.0", "2.1")
    )
    assert first == again != second
    pictures = [Image.open(BytesIO(base64.b64decode(each))) for each in (first, second)]
    assert [each.text["Comment"] for each in pictures] == ["1.0", "2.1"]
    assert np.array_equal(*map(np.asarray, pictures))


async def test_a_body_is_json_of_which_images_are_encoded_before_and_only_copied(directory, monkeypatch):
    parts = [image_part(_half_black(noise)) for noise in range(0, 24, 2)]
    sent = await SentImages.of(directory).prepared(asked(directory, "r", *parts, TEXT))
    lengths = {len(base64.b64decode(image.data)) % 3 for image in sent.images}
    assert lengths == {0, 1, 2}, "pictures end anywhere in base64"
    body = request_body(sent, rid="r", salt="1.0")
    monkeypatch.setattr(base64, "b64encode", _short_alone(base64.b64encode))
    assert request_body(sent, rid="r", salt="1.0") == body
    monkeypatch.setattr(json, "dumps", _short_alone(json.dumps))
    said = json.loads(as_json(body))
    assert said == body | {"image_data": [image.decode() for image in body["image_data"]]}
    for image in said["image_data"]:
        assert Image.open(BytesIO(base64.b64decode(image))).text["Comment"] == "1.0"
    assert json.loads(as_json({"rid": "r"})) == {"rid": "r"}


def _half_black(noise: int) -> bytes:
    """A picture of which this many columns are noise."""
    pixels = np.asarray(Image.open(BytesIO(picture(16, 24)))).copy()
    pixels[:, noise:] = 0
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _short_alone(encode):
    """Refuse to encode what is as long as a picture."""

    def refusing(given):
        assert len(str(given)) < 1000
        return encode(given)

    return refusing


async def test_siblings_have_an_image_made_ready_once_and_the_oldest_are_forgotten(directory, monkeypatch):
    made, resized = [], ImageReader.resized
    monkeypatch.setattr(ImageReader, "resized", lambda self, one: made.append(one) or resized(self, one))
    images = SentImages.of(directory)
    request = asked(directory, "r", image_part(picture()), TEXT)
    await asyncio.gather(*(images.prepared(request) for _ in range(3)))
    assert len(made) == 1
    monkeypatch.setattr(sent_images, "REMEMBERED_BYTES", 1)
    await images.prepared(asked(directory, "r", image_part(picture(seed=1)), TEXT))
    assert not images._resized


async def test_a_sampled_token_of_an_image_is_refused_beside_images_alone(directory):
    request = asked(directory, "r", image_part(picture()), TEXT)
    images = SentImages.of(directory)
    for token in ImageReader.of(directory).shown_ids:
        more = replace(request, token_ids=[*request.token_ids, token])
        with pytest.raises(RequestRefusedError, match=r"1 tokens beside .*type = \"embedded\""):
            await images.prepared(more)
        text = replace(more, images=())
        assert request_body(await images.prepared(text), rid="r", salt="")["input_ids"][-1] == token


async def test_a_model_of_text_is_sent_no_images(directory, model_dir):
    request = asked(directory, "r", image_part(picture()), TEXT)
    with pytest.raises(RequestRefusedError, match="r shows images, and the model reads none"):
        await SentImages.of(model_dir).prepared(request)


def test_an_answer_to_a_prompt_of_other_tokens_is_refused(directory):
    request = asked(directory, "r", image_part(picture(16, 24)), TEXT)
    meta = {
        "finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 5]],
        "weight_version": weights_label(0), "prompt_tokens": len(request.token_ids),
    }  # fmt: skip
    assert read_answer({"output_ids": [5], "meta_info": meta}, request).token_ids.tolist() == [5]
    other = {"output_ids": [5], "meta_info": {**meta, "prompt_tokens": 3}}
    with pytest.raises(RequestRefusedError, match=r"SGLang reads 3 tokens, .* preprocessor_config\.json"):
        read_answer(other, request)


@pytest.mark.parametrize(("version", "fits"), [("0.5.23", True), ("0.6.0.post1", True), ("0.5.22", False)])
def test_a_server_that_shows_images_as_older_weights_saw_them_is_refused(version, fits):
    facts = ServerFacts(
        version=version, model="m", update_sessions=True, reports_spans=True, returns_experts=False,
        streams=True, tensor_ranks=1, settings=({},),
    )  # fmt: skip
    if fits:
        facts.refuse_model({"model_type": "qwen3_vl"}, "http://x")
    else:
        with pytest.raises(ConfigError, match=r"http://x is SGLang 0\.5\.22, .* use 0\.5\.23 or later"):
            facts.refuse_model({"model_type": "qwen3_vl"}, "http://x")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"pause": "retract"}, "pause=retract.*in_place or drain"),
        ({"adapter": "loaded"}, "adapter=loaded.*merged"),
        ({"disaggregation": {"enabled": True}}, "disaggregation.*leave it out"),
    ],
)
def test_settings_under_which_images_would_be_others_are_refused(directory, model_dir, settings, complaint):
    unfit = SglangEngineConfig(**settings)
    with pytest.raises(ConfigError, match=complaint):
        refuse_unfit_model(unfit, directory)
    refuse_unfit_model(unfit, model_dir)
    for fit in (SglangEngineConfig(), EmbeddedEngineConfig()):
        refuse_unfit_model(fit, directory)


def test_a_family_of_which_sglang_reads_other_tokens_is_refused_there(tmp_path):
    directory = older_vision_directory(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"type=sglang: qwen2_5_vl is not known .* set it to embedded, and"):
        refuse_unfit_model(SglangEngineConfig(), directory)
    refuse_unfit_model(EmbeddedEngineConfig(), directory)
