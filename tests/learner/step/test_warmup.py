from itertools import pairwise

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from bus.errors import ConfigError
from bus.messages import Prompt
from learner.backends.megatron.trainer import Trainer
from learner.config.batch import BatchConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.warmup import WarmupConfig
from learner.data.demonstrations import Demonstrations
from learner.data.packing import pack
from learner.initial.scratch_model import character_tokenizer
from learner.step.warmup import heldout_figures
from storage.chats.template import ChatTemplate
from storage.images.chat import ImageChat
from tests.learner.tiny import tiny_config
from tests.pictures import image_part, picture, vision_directory
from tests.published_chats import CHATS, tokenizer_of_chat

ROWS = [(Prompt(content=f"sort {n:03d}"), "".join(sorted(f"{n:03d}"))) for n in range(10)]


def demonstrations(context=64, seed=0):
    return Demonstrations(ROWS, character_tokenizer(), context=context, vocabulary=10**6, seed=seed)


def test_only_the_response_and_its_end_are_trained():
    tokenizer = character_tokenizer()
    [batch] = pack(demonstrations().step(0, 1), 999)
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
    made = Demonstrations(
        [(Prompt(content="42+1?"), response)], tokenizer, context=256, vocabulary=10**6, seed=0
    )
    [batch] = pack(made.step(0, 1), 999)
    assert tokenizer.decode(batch.labels[batch.loss_mask].tolist()) == f"{written}<|return|>"
    assert tokenizer.decode(batch.tokens.tolist()).endswith(f"<|start|>assistant{written}<|return|>")


def test_each_epoch_visits_every_demonstration_once():
    tokenizer = character_tokenizer()
    seen = []
    for step in range(2):
        [batch] = pack(demonstrations().step(step, 5), 999)
        bounds = batch.cu_seqlens.tolist()
        seen += [tokenizer.decode(batch.tokens[a:b].tolist()) for a, b in pairwise(bounds)]
    assert len(set(seen)) == len(ROWS)


def test_a_position_gives_the_same_batch_whenever_it_is_asked_for():
    one = demonstrations()
    one.step(0, 4)
    later, at_once = one.step(7, 4), demonstrations().step(7, 4)
    assert [s.token_ids.tolist() for s in later] == [s.token_ids.tolist() for s in at_once]


def test_a_demonstration_beyond_the_context_is_refused_with_its_text():
    with pytest.raises(ConfigError, match=r"has \d+ tokens, the model's context is 8.*sort"):
        demonstrations(context=8).step(0, 1)


def test_a_demonstration_with_an_image_is_packed_with_it_and_trains_nothing_of_it(tmp_path):
    model = vision_directory(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": [image_part(picture(16, 24)), {"type": "text", "text": "?"}]}]
    rows = [(Prompt(content=chat), "3"), (Prompt(content="?"), "4")]
    images = ImageChat.of(model, tokenizer)
    made = Demonstrations(rows, tokenizer, context=64, vocabulary=10**6, seed=0, images=images)
    [batch] = pack(made.step(0, 2), 999)
    [image] = batch.images
    assert set(batch.tokens[image.start : image.stop].tolist()) == {images.reader.token_ids[1]}
    assert image.stop - image.start == 6
    assert tokenizer.decode(batch.labels[batch.loss_mask]) in ("3<|end|>4<|end|>", "4<|end|>3<|end|>")


def test_a_demonstration_with_an_image_is_refused_before_the_warm_up_of_a_text_model():
    chat = [{"role": "user", "content": [image_part(picture(16, 24))]}]
    rows = [*ROWS, (Prompt(content=chat), "3")]
    with pytest.raises(ConfigError, match=r"demonstration 10 \(from 0\): it shows an image, and the model"):
        Demonstrations(rows, character_tokenizer(), context=64, vocabulary=10**6, seed=0)


def trained_on(family: str, *messages: dict, **prompt) -> tuple[list[str], list[str]]:
    """Return the sequences that a chat becomes, as text, and what of them is trained."""
    tokenizer = tokenizer_of_chat(CHATS[family])
    made = Demonstrations(
        [(Prompt(content=list(messages), **prompt), "")], tokenizer, context=999, vocabulary=10**6, seed=0
    )
    [batch] = pack(made.step(0, 1), 999)
    bounds = list(pairwise(batch.cu_seqlens.tolist()))
    texts = [tokenizer.decode(batch.tokens[a:b].tolist()) for a, b in bounds]
    trained = [tokenizer.decode(batch.labels[a:b][batch.loss_mask[a:b]].tolist()) for a, b in bounds]
    return texts, trained


def said(role: str, content: str, **others) -> dict:
    return {"role": role, "content": content, **others}


CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = (
    said("system", "Add."),
    said("user", "1+1"),
    said("assistant", "2"),
    said("user", "2+2"),
    said("assistant", "4"),
)


def test_all_answers_of_a_chat_are_trained_in_the_text_that_the_template_writes():
    [text], [trained] = trained_on("Qwen3", *CHAT)
    template = ChatTemplate(tokenizer_of_chat(CHATS["Qwen3"]))
    assert text == template.render(CHAT, go_on=False).removesuffix("\n")
    assert trained == "2<|im_end|>4<|im_end|>"


def test_an_answer_of_weight_0_is_read_and_not_trained():
    [text], [trained] = trained_on("Qwen3", *CHAT[:2], said("assistant", "2", weight=0), *CHAT[3:])
    assert (text, trained) == (trained_on("Qwen3", *CHAT)[0][0], "4<|im_end|>")


def test_an_answer_is_a_sequence_of_its_own_where_a_later_chat_has_it_otherwise():
    texts, trained = trained_on(
        "gpt-oss", *CHAT
    )  # ends an answer with <|return|>, an earlier one with <|end|>
    start = "<|channel|>final<|message|>"
    assert trained == [f"{start}2<|return|>", f"{start}4<|return|>"]
    assert [text.count("1+1") for text in texts] == [1, 1]
    assert f"{start}2<|end|>" in texts[1]


def test_calls_are_trained_as_the_template_writes_them_and_results_are_not():
    answer = {"role": "assistant", "tool_calls": [CALL]}  # without content, as OpenAI's format has it
    chat = (CHAT[1], answer, said("tool", "2", tool_call_id="a"), CHAT[2])
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
    [text], [trained] = trained_on("Qwen3", *chat, tools=[tool])
    template = ChatTemplate(tokenizer_of_chat(CHATS["Qwen3"]))
    assert text == template.render(chat, [tool], go_on=False).removesuffix("\n")
    called, answer = trained.split("<|im_end|>")[:2]
    assert (called.count("<tool_call>"), '"name": "add"' in called, answer) == (1, True, "2")


def test_the_held_out_loss_is_the_mean_over_all_trained_tokens_and_changes_nothing():
    torch.manual_seed(0)
    config, batch = tiny_config(vocab_size=1000), BatchConfig(tokens_per_micro_batch=40)
    plain, made = Qwen3ForCausalLM(config), demonstrations()
    nats: list[float] = []
    for packed in pack(made.all(share=0, shares=2) + made.all(share=1, shares=2), 40):
        for a, b in pairwise(packed.cu_seqlens.tolist()):
            logprobs = plain(packed.tokens[None, a:b].long()).logits[0].log_softmax(-1)
            picked = logprobs.gather(1, packed.labels[a:b, None].long())[:, 0]
            nats += picked[packed.loss_mask[a:b]].tolist()
    assert len(nats) == 4 * len(ROWS)  # three digits and the end
    trainer = Trainer(config, plain.state_dict(), OptimizerConfig())
    before = trainer.export()
    found = heldout_figures(trainer, WarmupConfig(), batch, made)
    assert found == {"loss_nats": pytest.approx(-sum(nats) / len(nats), abs=1e-6)}
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.export().items())


def test_a_row_with_a_token_that_the_model_does_not_embed_is_named():
    made = Demonstrations(ROWS, character_tokenizer(), context=64, vocabulary=20, seed=0)
    with pytest.raises(ConfigError, match=r"demonstration 0 \(from 0\): .* embeds 20 tokens: leave it"):
        made.check()


@pytest.mark.parametrize(
    ("chat", "wrong"),
    [
        ((said("user", "?"), said("assistant", "1" * 999)), "it has 50150 tokens, the model's"),
        (
            (said("user", "?"), said("assistant", "", tool_calls=[CALL])),
            "does not write message 1 .* all its calls",
        ),
        ((said("assistant", "1"),), "empty conversation"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named_before_the_first_step(chat, wrong):
    rows = [*ROWS[:2] * 600, (Prompt(content=list(chat) * 50), "")]
    made = Demonstrations(rows, character_tokenizer(), context=999, vocabulary=10**6, seed=0)
    with pytest.raises(ConfigError, match=rf"demonstration 1200 \(from 0\): .*{wrong}"):
        made.check()
