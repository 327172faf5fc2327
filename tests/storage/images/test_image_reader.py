"""What a model's image processor makes of images, and the positions of their tokens, against transformers."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

from bus.errors import ConfigError
from bus.images import PlacedImage
from storage.images.chat import ImageChat, inlined
from storage.images.encoded import ImageError
from storage.images.positions import rope_delta, rope_positions
from storage.images.reader import ImageReader
from tests.pictures import image_part, picture, vision_directory


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return vision_directory(tmp_path_factory.mktemp("vision") / "model")


@pytest.mark.parametrize(("height", "width"), [(16, 24), (7, 90), (200, 120), (1, 1)])
def test_patches_and_tokens_are_those_of_transformers_processor(model, height, width):
    from io import BytesIO

    from PIL import Image

    data = picture(height, width)
    reader = ImageReader.of(model)
    image = reader.read(data)
    wanted = AutoImageProcessor.from_pretrained(model)(images=[Image.open(BytesIO(data))])
    np.testing.assert_array_equal(reader.patches(image), wanted["pixel_values"])
    assert [list(reader.grid(image))] == np.asarray(wanted["image_grid_thw"]).tolist()
    assert image.rows * image.columns * 4 == len(reader.patches(image))


def test_an_image_that_another_processor_divided_is_refused(model):
    reader = ImageReader.of(model)
    image = reader.read(picture())
    reader.patches(image)  # remembered, which says nothing about others of the same bytes
    for other in (image._replace(columns=9), image._replace(rows=image.columns, columns=image.rows)):
        with pytest.raises(ImageError, match="actors and learner need the same one"):
            reader.patches(other)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"patch_size": 8}, "patch_size is 8, the model's 4"),
        ({"do_resize": False}, "do_resize is False, the model's True"),
        (None, "has no preprocessor_config.json: copy it"),
    ],
)
def test_a_processor_of_another_model_is_refused(tmp_path, change, complaint):
    model = vision_directory(tmp_path / "model")
    file = model / "preprocessor_config.json"
    if change is None:
        file.unlink()
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=complaint):
        ImageReader.of(model)


@pytest.mark.parametrize(
    "places", [[], [(0, 2, 3)], [(3, 2, 3), (11, 1, 5)], [(3, 4, 1), (10, 2, 2)], [(2, 3, 3)]]
)
def test_positions_are_those_of_transformers(model, places):
    images = [PlacedImage("", start, rows, columns) for start, rows, columns in places]
    length = 20
    kinds = np.zeros(length, np.int64)
    for image in images:
        kinds[image.start : image.stop] = 1
    hf = Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(model))
    grids = torch.tensor([[1, 2 * image.rows, 2 * image.columns] for image in images]).reshape(-1, 3)
    wanted, delta = hf.model.get_rope_index(
        torch.zeros((1, length), dtype=torch.long), torch.from_numpy(kinds)[None], grids
    )
    np.testing.assert_array_equal(rope_positions(length, images), wanted[:, 0].numpy())
    assert rope_delta(images) == delta.item()


def test_a_chat_has_as_many_tokens_for_an_image_as_it_has_merged_patches(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = ImageChat.of(model, tokenizer)
    content = [{"type": "text", "text": "a"}, image_part(picture(16, 24)), image_part(picture(8, 8))]
    [message], found = inlined([{"role": "user", "content": content}], chat)
    assert message["content"] == "a" + 2 * "<|vision_start|><|image_pad|><|vision_end|>"
    tokens, placed = chat.expanded(tokenizer.encode(message["content"]), found)
    assert [(image.start, image.rows, image.columns) for image in placed] == [(2, 2, 3), (10, 1, 1)]
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert [n for n, token in enumerate(tokens) if token == pad] == [*range(2, 8), 10]


def test_text_that_would_stand_for_an_image_is_refused(model):
    chat = ImageChat.of(model, AutoTokenizer.from_pretrained(model))
    with pytest.raises(ImageError, match=r"it has <\|image_pad\|> in its text"):
        inlined([{"role": "user", "content": "see <|image_pad|>"}], chat)
    with pytest.raises(ImageError, match="the chat template shows 0 images of 1"):
        chat.expanded([1, 2], [chat.reader.read(picture())])
