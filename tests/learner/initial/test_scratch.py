from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.config.model import ScratchModel
from learner.initial.scratch_model import build_model_directory

SIZES = ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, context=32)


def test_transformers_loads_the_directory_and_the_seed_decides_the_weights(tmp_path):
    one, same, other = (
        AutoModelForCausalLM.from_pretrained(build_model_directory(tmp_path / name, SIZES, seed=seed))
        for name, seed in (("one", 0), ("same", 0), ("other", 1))
    )
    embeddings = [model.model.embed_tokens.weight for model in (one, same, other)]
    assert embeddings[0].equal(embeddings[1])
    assert not embeddings[0].equal(embeddings[2])
    assert one.lm_head.weight is one.model.embed_tokens.weight


def test_tokenizer_has_one_token_per_character_and_ends_an_assistants_turn(tmp_path):
    build_model_directory(tmp_path, SIZES, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "sort 21"}, {"role": "assistant", "content": "12"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>sort 21<|assistant|>12<|end|>"
    assert len(tokenizer("sort 21", add_special_tokens=False)["input_ids"]) == len("sort 21")
    assert tokenizer.decode(tokenizer("sort 21")["input_ids"]) == "sort 21"
