"""Images of data files: found beside the file or in its rows, and refused with where and what to do."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from bus.errors import ConfigError
from storage.prompt_files.dataset import load_prompts
from storage.prompts.length_check import check_measured_prompts, check_prompt_lengths
from storage.settings.data import PromptKeys
from tests.pictures import data_uri, image_part, picture, vision_directory


def rows(path, *parts, **columns):
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "how many?"}]}
    path.write_text(json.dumps({"prompt": [message], "label": "3", **columns}) + "\n")
    return path


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "shapes/one.png"},
        {"type": "image_url", "image_url": "shapes/one.png"},
        {"type": "image_url", "image_url": {"url": data_uri(picture())}},
    ],
)
def test_an_image_of_a_row_becomes_part_of_its_prompt(tmp_path, part):
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "one.png").write_bytes(picture())
    [prompt] = load_prompts(rows(tmp_path / "a.jsonl", part), PromptKeys())
    assert prompt.content[0]["content"] == [image_part(picture()), {"type": "text", "text": "how many?"}]


def test_a_photo_of_a_phone_with_pictures_behind_it_is_a_jpeg(tmp_path):
    photo = Image.new("RGB", (24, 16))
    photo.save(tmp_path / "photo.jpg", "MPO", save_all=True, append_images=[photo])
    data = (tmp_path / "photo.jpg").read_bytes()
    [prompt] = load_prompts(rows(tmp_path / "a.jsonl", {"type": "image", "image": "photo.jpg"}), PromptKeys())
    assert prompt.content[0]["content"][0]["image_url"]["url"] == data_uri(data, "jpeg")


def test_parts_without_an_image_take_those_of_the_column(tmp_path):
    message = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}],
    }
    images = [{"bytes": picture(seed=n), "path": None} for n in range(2)]
    table = pa.Table.from_pylist([{"prompt": json.dumps([message]), "images": images}])
    table = table.set_column(0, "prompt", pa.array([[message]]))
    pq.write_table(table, tmp_path / "a.parquet")
    [prompt] = load_prompts(tmp_path / "a.parquet", PromptKeys())
    shown = [part for part in prompt.content[0]["content"] if part["type"] == "image_url"]
    assert shown == [image_part(picture(seed=n)) for n in range(2)]


@pytest.mark.parametrize(
    "prompt",
    [
        "<image>how many? <image>",
        [{"role": "user", "content": "<image>how many? <image>"}],
        [{"role": "user", "content": ["<image>", {"type": "text", "text": "how many? <image>"}]}],
    ],
)
def test_places_in_texts_take_the_images_of_the_column(tmp_path, prompt):
    images = [data_uri(picture(seed=n)) for n in range(2)]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": prompt, "images": images}))
    [found] = load_prompts(tmp_path / "a.jsonl", PromptKeys())
    first, second = (image_part(picture(seed=n)) for n in range(2))
    content = [first, {"type": "text", "text": "how many? "}, second]
    assert found.content == [{"role": "user", "content": content}]


def test_a_place_is_text_where_the_row_has_no_images(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "what is <image>?", "images": []}))
    assert load_prompts(tmp_path / "a.jsonl", PromptKeys())[0].content == "what is <image>?"


@pytest.mark.parametrize(
    ("part", "columns", "complaint"),
    [
        (
            {"type": "image", "image": "gone.png"},
            {},
            "gone.png cannot be read .No such file or directory.: check",
        ),
        (
            {"type": "image", "image": "https://x.org/a.png"},
            {},
            "is not fetched: download it, and give its path",
        ),
        (
            {"type": "image", "image": "text.png"},
            {},
            "9 bytes are no image that can be read .*: use PNG or JPEG",
        ),
        ({"type": "image", "image": "cut.png"}, {}, "no image that can be read .*: use PNG or JPEG"),
        ({"type": "image", "image": "a.gif"}, {}, "an image is GIF: save it as PNG or JPEG"),
        (
            {"type": "image", "image": "deep.png"},
            {},
            "more than 8 bits a channel .mode I;16.: save it with 8",
        ),
        ({"type": "image"}, {}, "an image part without an image: give its path or a data URI, or a column"),
        (
            {"type": "image"},
            {"images": ["a.png", "a.png"]},
            "has 2 images, and the messages show 1 of them: write <image> or a part of type image where",
        ),
        (
            {"type": "text", "text": "<image>"},
            {"images": ["a.png", "a.png"]},
            "has 2 images, and the messages show 1 of them",
        ),
        ({"type": "text", "text": "see"}, {"images": ["a.png"]}, "has 1 images, and the messages show 0"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,%89"}}, {}, "is none: it is not base64"),
    ],
)
def test_an_image_that_cannot_be_read_is_refused_with_its_row(tmp_path, part, columns, complaint):
    (tmp_path / "text.png").write_bytes(b"no image!")
    (tmp_path / "cut.png").write_bytes(picture()[:300])
    (tmp_path / "a.png").write_bytes(picture())
    (tmp_path / "a.gif").write_bytes(picture(kind="GIF"))
    Image.fromarray(np.full((8, 8), 1000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(ConfigError, match=rf"a.jsonl, line 1: 'prompt': .*{complaint}"):
        load_prompts(rows(tmp_path / "a.jsonl", part, **columns), PromptKeys())


def test_prompts_are_as_long_as_the_tokens_of_their_images(tmp_path):
    model = vision_directory(tmp_path / "model")
    prompts = load_prompts(rows(tmp_path / "a.jsonl", image_part(picture(16, 24))), PromptKeys())
    tokens = len("<user>") - 5 + 2 + 2 * 3 + len("how many?") + 1  # user, begin and end, merged patches, text
    check_prompt_lengths(prompts, model, max_new_tokens=128 - tokens)
    with pytest.raises(ConfigError, match=f"prompt 1 has {tokens} tokens: 5 of them of images, with"):
        check_prompt_lengths(prompts, model, max_new_tokens=129 - tokens)


def test_a_model_without_vision_refuses_images_before_the_run(tmp_path):
    from learner.config.model import ScratchModel
    from learner.initial.scratch_model import build_model_directory

    model = build_model_directory(tmp_path / "model", ScratchModel(hidden_size=16, heads=2), seed=0)
    prompts = load_prompts(rows(tmp_path / "a.jsonl", image_part(picture())), PromptKeys())
    unseen = "it shows an image, and the model reads nothing but text"
    with pytest.raises(ConfigError, match=f"prompt 1: {unseen}"):
        check_prompt_lengths(prompts, model, max_new_tokens=4)
    text = load_prompts(rows(tmp_path / "b.jsonl", {"type": "text", "text": "see"}), PromptKeys())
    check_measured_prompts({"held-out prompts": text}, model)
    with pytest.raises(ConfigError, match=f"prompt 2 of the evaluation.sets 'charts': {unseen}"):
        check_measured_prompts(
            {"held-out prompts": text, "evaluation.sets 'charts'": [*text, *prompts]}, model
        )


def test_a_text_that_would_be_taken_for_an_image_is_refused_in_held_out_prompts(tmp_path):
    model = vision_directory(tmp_path / "model")
    shown = load_prompts(rows(tmp_path / "a.jsonl", image_part(picture())), PromptKeys())
    check_measured_prompts({"held-out prompts": shown}, model)
    part = {"type": "text", "text": "see <|image_pad|>"}
    marked = load_prompts(rows(tmp_path / "b.jsonl", part), PromptKeys())
    with pytest.raises(ConfigError, match=r"prompt 1 of the held-out prompts: it has <\|image_pad\|>"):
        check_measured_prompts({"held-out prompts": marked}, model)
