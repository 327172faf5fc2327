from itertools import pairwise

import pytest
from transformers import AutoTokenizer

from bus.errors import ConfigError
from bus.messages import Prompt
from learner.config.batch import BatchConfig
from learner.config.warmup import WarmupConfig
from learner.data.demonstrations import Demonstrations
from learner.initial.scratch_model import character_tokenizer
from storage.images.chat import ImageChat
from tests.pictures import image_part, picture, vision_directory
from tests.published_chats import CHATS, tokenizer_of_chat

ROWS = [(Prompt(content=f"sort {n:03d}"), "".join(sorted(f"{n:03d}"))) for n in range(10)]


def demonstrations(context=64, seed=0):
    return Demonstrations(ROWS, character_tokenizer(), context=context, seed=seed)


def test_only_the_response_and_its_end_are_trained():
    tokenizer = character_tokenizer()
    [batch] = demonstrations().step(0, WarmupConfig(batch_size=1), BatchConfig())
    trained = tokenizer.decode(batch.labels[batch.loss_mask].tolist())
    assert trained.endswith("<|end|>")
    prompt = tokenizer.decode(batch.tokens.tolist())
    assert prompt.startswith("<|user|>sort ")
    digits = trained.removesuffix("<|end|>")
    assert sorted(digits) == list(digits)


@pytest.mark.parametrize(
    ("response", "written"),
    [
        ("43", "<|channel|>final<|message|>43"),
        ("<|channel|>analysis<|message|>43", "<|channel|>analysis<|message|>43"),
    ],
)
def test_a_response_is_written_as_the_chat_template_writes_answers_unless_it_has_its_own_start(
    response, written
):
    tokenizer = tokenizer_of_chat(CHATS["gpt-oss"])
    made = Demonstrations([(Prompt(content="42+1?"), response)], tokenizer, context=256, seed=0)
    [batch] = made.step(0, WarmupConfig(batch_size=1), BatchConfig())
    assert tokenizer.decode(batch.labels[batch.loss_mask].tolist()) == f"{written}<|return|>"
    assert tokenizer.decode(batch.tokens.tolist()).endswith(f"<|start|>assistant{written}<|return|>")


def test_each_epoch_visits_every_demonstration_once():
    warmup = WarmupConfig(batch_size=5)
    tokenizer = character_tokenizer()
    seen = []
    for step in range(2):
        [batch] = demonstrations().step(step, warmup, BatchConfig())
        bounds = batch.cu_seqlens.tolist()
        seen += [tokenizer.decode(batch.tokens[a:b].tolist()) for a, b in pairwise(bounds)]
    assert len(set(seen)) == len(ROWS)


def test_a_position_gives_the_same_batch_whenever_it_is_asked_for():
    warmup = WarmupConfig(batch_size=4)
    one = demonstrations()
    one.step(0, warmup, BatchConfig())
    [later] = one.step(7, warmup, BatchConfig())
    [at_once] = demonstrations().step(7, warmup, BatchConfig())
    assert later.tokens.tolist() == at_once.tokens.tolist()


def test_a_demonstration_beyond_the_context_is_refused_with_its_text():
    with pytest.raises(ConfigError, match=r"has \d+ tokens, the model's context is 8.*sort"):
        demonstrations(context=8).step(0, WarmupConfig(batch_size=1), BatchConfig())


def test_a_demonstration_with_an_image_is_packed_with_it_and_trains_nothing_of_it(tmp_path):
    model = vision_directory(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": [image_part(picture(16, 24)), {"type": "text", "text": "?"}]}]
    rows = [(Prompt(content=chat), "3"), (Prompt(content="?"), "4")]
    images = ImageChat.of(model, tokenizer)
    made = Demonstrations(rows, tokenizer, context=64, seed=0, images=images)
    [batch] = made.step(0, WarmupConfig(batch_size=2), BatchConfig())
    [image] = batch.images
    assert set(batch.tokens[image.start : image.stop].tolist()) == {images.reader.token_ids[1]}
    assert image.stop - image.start == 6
    assert tokenizer.decode(batch.labels[batch.loss_mask]) in ("3<|end|>4<|end|>", "4<|end|>3<|end|>")


def test_a_demonstration_with_an_image_is_refused_before_the_warm_up_of_a_text_model():
    chat = [{"role": "user", "content": [image_part(picture(16, 24))]}]
    rows = [*ROWS, (Prompt(content=chat), "3")]
    with pytest.raises(ConfigError, match=r"demonstration 10 \(from 0\): it shows an image, and the model"):
        Demonstrations(rows, character_tokenizer(), context=64, seed=0)
