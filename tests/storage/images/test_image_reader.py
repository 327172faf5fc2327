"""What a model's image processor makes of images, and the positions of their tokens, against transformers."""

import json
import shutil
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

from bus.errors import ConfigError
from bus.images import PlacedImage
from storage.images.chat import ImageChat, inlined
from storage.images.encoded import ImageError
from storage.images.positions import rope_delta, rope_positions
from storage.images.reader import ImageReader
from tests.pictures import image_part, picture, vision_directory

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return vision_directory(tmp_path_factory.mktemp("vision") / "model")


@pytest.mark.parametrize(("height", "width"), [(16, 24), (7, 90), (200, 120), (1, 1)])
def test_patches_and_tokens_are_those_of_transformers_processor(model, height, width):
    data = picture(height, width)
    reader = ImageReader.of(model)
    image = reader.read(data)
    wanted = AutoImageProcessor.from_pretrained(model)(images=[Image.open(BytesIO(data))])
    np.testing.assert_array_equal(reader.patches(image), wanted["pixel_values"])
    assert [list(reader.grid(image))] == np.asarray(wanted["image_grid_thw"]).tolist()
    assert image.rows * image.columns * 4 == len(reader.patches(image))


@pytest.mark.parametrize(("height", "width"), [(16, 24), (7, 90), (200, 120), (1, 1), (37, 53)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_resized_image_has_the_patches_of_the_image_and_is_resized_no_more(model, height, width, kind):
    reader = ImageReader.of(model)
    image = reader.read(picture(height, width, kind=kind))
    resized = reader.read(reader.resized(image))
    pixels = Image.open(BytesIO(resized.data))
    assert (pixels.mode, pixels.size) == ("RGB", (image.columns * 8, image.rows * 8))
    np.testing.assert_array_equal(reader.patches(resized), reader.patches(image))


def test_sizes_in_the_words_of_older_models_count_pixels(model, tmp_path):
    """As Qwen2.5-VL is published."""
    older = tmp_path / "model"
    shutil.copytree(model, older)
    file = older / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    del settings["size"]
    file.write_text(json.dumps(settings | {"min_pixels": 64 * 4, "max_pixels": 64 * 9}))
    reader = ImageReader.of(older)
    tokens = [image.rows * image.columns for image in map(reader.read, (picture(8, 8), picture(200, 200)))]
    assert tokens == [4, 9]


def test_an_image_that_would_be_resized_twice_has_no_final_size(model, tmp_path):
    narrow = tmp_path / "model"
    shutil.copytree(model, narrow)
    file = narrow / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["size"] = {"shortest_edge": 64, "longest_edge": 64 * 4}  # four tokens
    file.write_text(json.dumps(settings))
    reader = ImageReader.of(narrow)
    with pytest.raises(ImageError, match=r"of 1200 x 8 pixels is resized to .*save one that is less narrow"):
        reader.resized(reader.read(picture(8, 1200)))


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_shown_upright_as_its_exif_says(model, kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.open(BytesIO(picture(16, 32))), kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    reader = ImageReader.of(model)
    image = reader.read(data)
    assert (image.rows, image.columns) == (upright.height // 8, upright.width // 8)
    wanted = AutoImageProcessor.from_pretrained(model)(images=[upright.convert("RGB")])
    np.testing.assert_array_equal(reader.patches(image), wanted["pixel_values"])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_other_modes_become_rgb(model, mode):
    data = encoded(Image.open(BytesIO(picture())).convert(mode), "JPEG" if mode == "CMYK" else "PNG")
    wanted = encoded(Image.open(BytesIO(data)).convert("RGB"))
    reader = ImageReader.of(model)
    np.testing.assert_array_equal(reader.patches(reader.read(data)), reader.patches(reader.read(wanted)))


def test_of_a_cameras_file_of_several_pictures_the_first_is_shown(model):
    first, second = (Image.open(BytesIO(picture(seed=n))) for n in range(2))
    data = encoded(first, "MPO", save_all=True, append_images=[second])
    reader = ImageReader.of(model)
    wanted = encoded(Image.open(BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(reader.patches(reader.read(data)), reader.patches(reader.read(wanted)))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (
            lambda: encoded(Image.fromarray(np.full((16, 16), 999, np.uint16))),
            r"more than 8 bits a channel \(mode I;16\)",
        ),
        (
            lambda: encoded(Image.new("L", (8, 8)), save_all=True, append_images=[Image.new("L", (8, 8), 9)]),
            "is animated, of 2 pictures: save one of them",
        ),
        (
            lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",
            "an image is EPS: save it as PNG or JPEG",
        ),
        (lambda: encoded(Image.new("1", (20000, 9000))), r"is too large .*: save a smaller one"),
    ],
    ids=["deep", "animated", "program", "huge"],
)
def test_what_would_not_be_seen_as_it_is_is_refused(model, data, complaint):
    with pytest.raises(ImageError, match=complaint):
        ImageReader.of(model).read(data())


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
        ({"size": {"height": 8, "width": 8}}, "give the fewest and the most pixels of an image as shortest"),
        (None, "has no preprocessor_config.json, and no processor_config.json with an image processor: copy"),
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


def test_a_directory_that_transformers_has_saved_anew_is_read_from_its_one_file(model, tmp_path):
    directory = shutil.copytree(model, tmp_path / "model")
    described = json.loads((directory / "preprocessor_config.json").read_text())
    smaller = described | {"size": {"shortest_edge": 64, "longest_edge": 128}}
    file = directory / "processor_config.json"
    file.write_text(json.dumps({"image_processor": smaller}))  # which transformers reads before the other
    data = picture(16, 24)
    assert ImageReader.of(model).read(data)[2:4] == (2, 3)
    assert ImageReader.of(directory).read(data)[2:4] == (1, 1)
    (directory / "preprocessor_config.json").unlink()
    assert ImageReader.of(directory).read(data)[2:4] == (1, 1)
    file.write_text(json.dumps({"image_processor": smaller | {"patch_size": 8}}))
    with pytest.raises(ConfigError, match=r"processor_config.json: patch_size is 8, the model's 4"):
        ImageReader.of(directory)


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
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "<|image_pad|>"}}]}
    with pytest.raises(ImageError, match=r"has <\|image_pad\|> in its text"):
        inlined([called], chat)
    with pytest.raises(ImageError, match="the chat template shows 0 images of 1"):
        chat.expanded([1, 2], [chat.reader.read(picture())])
