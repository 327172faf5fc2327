"""A model directory made here: a tiny random Qwen3 and a tokenizer of one token per character."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from learner.config import ScratchModel
from learner.conversion.files import save_hf_directory

PAD, END, USER, ASSISTANT, UNKNOWN = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>"
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=():,.?\n%<>|"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_model_directory(directory: Path, sizes: ScratchModel, *, seed: int) -> Path:
    """Write config, random weights (drawn from `seed`) and tokenizer into `directory`; returns it."""
    tokenizer = character_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.hidden_size // sizes.heads,
        max_position_embeddings=sizes.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    save_hf_directory(directory, config, dict(model.named_parameters()), None)
    tokenizer.save_pretrained(directory)
    return directory


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of a small alphabet, with a chat template."""
    vocabulary = {token: n for n, token in enumerate((PAD, END, USER, ASSISTANT, UNKNOWN, *ALPHABET))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
