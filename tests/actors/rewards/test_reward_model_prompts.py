"""The reward `reward_model` reads what the policy was asked, the functions that it was offered included."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from actors.episodes.task import Task
from actors.rewards.builtin.served import scoring
from actors.rewards.scoring.answer_scoring import answer_to
from bus.messages import Prompt
from learner.initial.scratch_model import character_tokenizer
from tests.actors.conftest import TEMPLATE

TOOLS = "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}"


def test_the_prompt_is_rendered_with_its_tools(tmp_path: Path):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TOOLS + TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    config = Qwen3Config(
        vocab_size=len(tokenizer), num_attention_heads=2, num_key_value_heads=1, num_labels=1,
        pad_token_id=tokenizer.pad_token_id, **sizes,
    )  # fmt: skip
    model = Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    score = scoring(tmp_path, "cpu")

    def scored(offered: list[dict[str, object]]) -> float:
        task = Task.of(Prompt(content="1+1", tools=offered), "one")
        return score(answer_to(task, "2", "stop", token_count=1))

    tokens = tokenizer("add<|user|>1+1<|assistant|>2<|end|>", return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        by_hand = model(tokens["input_ids"]).logits.item()
    assert scored(tools) == pytest.approx(by_hand, abs=1e-6)
    assert scored([]) != pytest.approx(by_hand, abs=1e-6)
