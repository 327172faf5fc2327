"""A model directory made here: a tiny random Qwen3 and a tokenizer of one token per character."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from bus.errors import ConfigError
from learner.config.model import ScratchModel
from learner.model_directories.model_directory import save_hf_directory

PAD, END, USER, ASSISTANT, UNKNOWN = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>"
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=():,.?\n%<>|"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def ensure_model_directory(directory: Path, sizes: ScratchModel, *, seed: int) -> None:
    """Make the directory if it is not there. Raises `ConfigError` when it holds a model of other sizes."""
    if not (directory / "config.json").exists():
        build_model_directory(directory, sizes, seed=seed)
        return
    found, wanted = (config.to_dict() for config in (_read(directory), _config(sizes, character_tokenizer())))
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "intermediate_size", "max_position_embeddings")  # fmt: skip
    other = [f"{key} is {found.get(key)}, not {wanted[key]}" for key in keys if found.get(key) != wanted[key]]
    if other:
        raise ConfigError(
            f"the run's scratch model in {directory} was made with other sizes ({', '.join(other)}): "
            "choose another --run, or the sizes it was made with"
        )


def build_model_directory(directory: Path, sizes: ScratchModel, *, seed: int) -> Path:
    """Write config, random weights (drawn from `seed`) and tokenizer into `directory`; returns it."""
    tokenizer = character_tokenizer()
    config = _config(sizes, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    save_hf_directory(directory, config, dict(model.named_parameters()), None)
    tokenizer.save_pretrained(directory)
    return directory


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per character of a small alphabet, with a chat template."""
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


def _read(directory: Path) -> Qwen3Config:
    return Qwen3Config.from_pretrained(directory)


def _config(sizes: ScratchModel, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],  # by which inference engines tell what to serve
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
