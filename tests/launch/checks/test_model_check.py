"""What a start refuses of a model directory: every oddity of files of others, with its value and a remedy."""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AddedToken, AutoConfig, AutoTokenizer, Olmo2Config, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bus.errors import ConfigError
from bus.process import called_apart
from launch.checks import memory_check, model_check
from launch.checks.model_check import refuse_model, refuse_models
from launch.checks.model_remarks import model_remarks
from launch.settings.run_config import resolve
from learner.backends.suitability import refuse_untrainable
from learner.config.model import ModelConfig
from learner.config.parallel import UNDIVIDED
from learner.initial.scratch_model import character_tokenizer
from learner.model_directories.model_directory import load_hf_config
from tests.learner.tiny import FAMILIES, tiny_config, tiny_model

MOST_LINES, LONGEST_LINE = 30, 700
"""What one screen of a terminal shows."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    tiny_model("qwen3", seed=0).save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def settings(model: Path, **learner: object):
    return resolve({
        "model": {"path": model}, "sampling": {"max_new_tokens": 8}, "learner": learner,
        "directory": model.parent / "runs", "data": {"prompts": model.parent / "p.jsonl"},
    })  # fmt: skip


def refusal(model: Path, **learner: object) -> str:
    """Return what the check says, which must fit a screen; nothing for a model that it accepts."""
    try:
        refuse_model(settings(model, **learner))
    except ConfigError as error:
        return on_a_screen(str(error))
    return ""


def on_a_screen(said: str) -> str:
    lines = said.splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= LONGEST_LINE
    assert "Traceback" not in said
    return said


def changed(file: Path, **values: object) -> None:
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def renamed(model: Path, name: str) -> None:
    (model / "model.safetensors").rename(model / name)


def changed_weights(model: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({name: change(tensor) for name, tensor in tensors.items()}, model / "model.safetensors")


def in_shards(model: Path, other: str | int = "two.safetensors") -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    save_file(tensors, model / "one.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "one.safetensors")}
    index["weight_map"]["model.norm.weight"] = other
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def other_shapes(model: Path) -> None:
    changed_weights(model, lambda _: np.zeros((3, 3), np.float32))


def template(model: Path, text: str | None) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    changed(model / "tokenizer_config.json", chat_template=None)
    if text is not None:
        (model / "chat_template.jinja").write_text(text)


def with_added(model: Path, token: str, **changes: str) -> None:
    """Add a token to those that the model embeds."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(AddedToken(token, special=True))
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(model)


SPOILT: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no config": (lambda m: (m / "config.json").unlink(), "it has no config.json", ""),
    "list": (lambda m: (m / "config.json").write_text("[1]"), "it is a list", "download the directory again"),
    "null": (lambda m: (m / "config.json").write_text("null"), "cannot read", "download"),
    "bytes": (lambda m: (m / "config.json").write_bytes(b"\xff\xfe\x00"), "cannot read", "download"),
    "unknown": (lambda m: changed(m / "config.json", model_type="mystery"), "mystery", "download"),
    "no type": (lambda m: changed(m / "config.json", model_type=None), "config.json", "download"),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "has neither model.safetensors", "download"),
    "another name": (lambda m: renamed(m, "pytorch.safetensors"), "is pytorch.safetensors", "name a"),
    "a pickle": (lambda m: renamed(m, "pytorch_model.bin"), "pytorch_model.bin", "save_pretrained"),
    "a GGUF file": (lambda m: renamed(m, "q4.gguf"), "there is q4.gguf", "launch convert gguf"),
    "adapters": (lambda m: renamed(m, "adapter_model.safetensors"), "adapter_model", "merge_and_unload"),
    "a file that is a number": (
        lambda m: in_shards(m, 3), "the file of model.norm.weight is 3, which is no name", "download"
    ),
    "deep": (lambda m: (m / "config.json").write_text('{"a":' * 10**5), "cannot read", "download"),
    "integers": (
        lambda m: changed_weights(m, lambda t: t.astype(np.int8)), "are of another.* is I8", "dequantise"
    ),
    "torn header": (lambda m: cut(m / "model.safetensors", 40), "config.json ties|damaged|torn", ""),
    "cut short": (lambda m: cut(m / "model.safetensors", 20000), "damaged", "download"),
    "a lost shard": (in_shards, "two.safetensors: it is missing", "download"),
    "other shapes": (other_shapes, "do not fit its config.json", "and .* more"),
    "no tokenizer": (
        lambda m: [file.unlink() for file in m.glob("*token*")], "has no tokenizer", "tokenizer.json"
    ),
    "torn tokenizer": (
        lambda m: (m / "tokenizer.json").write_text("{"), "cannot read the tokenizer", "download"
    ),
    "small vocabulary": (
        lambda m: changed(m / "config.json", vocab_size=9), "58 tokens, the model embeds 9", "of this model"
    ),
    "no template": (lambda m: template(m, None), "has no chat template", "chat_template.jinja"),
    "a template that raises": (
        lambda m: template(m, "{{ raise_exception('never') }}"), "not even a conversation.*never", "mend"
    ),
    "a template of no syntax": (lambda m: template(m, "{% if %}"), "not even a conversation", "mend"),
    "a template that divides": (lambda m: template(m, "{{ 1 // 0 }}"), "ZeroDivisionError", "mend"),
    "a template of one text": (
        lambda m: template(m, "hello"), "writes a user's message 'Hello' as 'hello'", "mend chat_template"
    ),
    "an empty template": (lambda m: template(m, ""), "no chat template|without its text", "chat_"),
    "an end that was added": (
        lambda m: with_added(m, "<|end of mine|>", eos_token="<|end of mine|>"), "end of mine", "resize_token"
    ),
    "a template with a token that was added": (
        lambda m: with_added(m, "<|mine|>", chat_template="<|mine|>{{ messages[0].content }}"),
        "<|mine|>", "resize_token",
    ),
    "a billion layers": (
        lambda m: changed(m / "config.json", num_hidden_layers=10**9, layer_types=None),
        "num_hidden_layers=1000000000", "download",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_directory_is_refused_with_value_and_remedy(name: str, model: Path):
    spoil, value, remedy = SPOILT[name]
    spoil(model)
    said = refusal(model)
    assert re.search(value, said), said
    assert re.search(remedy, said), said


def test_a_whole_model_is_accepted_by_both_backends(model: Path):
    assert refusal(model) == refusal(model, backend="fsdp") == ""


def buffers_of_old_files(model: Path) -> None:
    """Write the buffers that Llama's first files have."""
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    save_file(load_file(model / "model.safetensors") | old, model / "model.safetensors")


@pytest.mark.parametrize(
    "change", [buffers_of_old_files, lambda model: with_added(model, "<image_soft_token>")]
)
def test_what_published_models_have_beside_is_accepted_by_both_backends(change, model: Path):
    change(model)
    assert refusal(model) == refusal(model, backend="fsdp") == ""


def test_layout_ranks_and_other_models_are_asked(model: Path, tmp_path: Path):
    assert "num_attention_heads=4 does not divide by tensor=7" in refusal(
        model, parallel={"tensor": 7}, world={"processes": 7}
    )
    assert "does not divide the world of 1 ranks" in refusal(model, parallel={"tensor": 2})
    reference = {"kl_coef": 0.1, "path": tmp_path / "nowhere"}
    said = refusal(model, reference=reference)
    assert "nowhere is not a model directory: there is no such directory: download the directory" in said


def test_what_one_backend_lacks_names_the_other(tmp_path: Path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 16, "pad_token_id": None}  # fmt: skip
    with pytest.raises(ConfigError, match=r"learner\.backend=fsdp trains this model"):
        refuse_untrainable(ModelConfig(), "megatron", Olmo2Config(**sizes), UNDIVIDED)
    refuse_untrainable(ModelConfig(), "fsdp", Olmo2Config(**sizes), UNDIVIDED)


@pytest.mark.parametrize(
    ("memory", "disk", "said"),
    [(10**5, 10**12, "of the memory of this host"), (10**12, 10**5, "--directory"), (10**12, 10**12, "")],
)
def test_a_model_larger_than_the_host_is_refused(memory: int, disk: int, said: str, model, monkeypatch):
    monkeypatch.setattr(memory_check, "memory_bytes", lambda: memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=disk))
    assert said in refusal(model)
    assert bool(said) == bool(refusal(model))


def taken_of_the_host(model: Path, monkeypatch, warmup: Mapping[str, object], **learner: object) -> int:
    asked = resolve(settings(model, **learner).model_dump(exclude_unset=True), {"warmup": warmup})
    said = dict[str, int]()
    monkeypatch.setattr(memory_check, "memory_bytes", lambda: 0)
    monkeypatch.setattr(memory_check, "_refuse", lambda _, where, needed, *__: said.update({where: needed}))
    memory_check.refuse_too_large(asked, load_hf_config(model))
    return next(needed for where, needed in said.items() if "of this host" in where)


def test_versions_that_are_published_whole_have_no_copy_on_a_cpu(model: Path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    whole, deltas = (
        taken_of_the_host(model, monkeypatch, {}, publication={"snapshot_every": every}) for every in (1, 10)
    )
    published = sum(weight.size for weight in load_file(model / "model.safetensors").values())
    assert deltas - whole == 4 * published


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_the_reference_of_a_run_on_pairs_counts_as_memory(backend: str, model: Path, monkeypatch):
    def taken(loss: str) -> int:
        stage = {"steps": 1, "loss": {"type": loss}, "demonstrations": model / "rows.jsonl"}
        return taken_of_the_host(model, monkeypatch, stage, backend=backend)

    of_weights = 4 * sum(each.numel() for each in tiny_model("qwen3", seed=0).parameters())
    assert taken("dpo") - taken("sft") == 2 * of_weights


def test_what_checkpoints_are_copied_to_counts_as_memory_of_a_host_with_gpus(model: Path, monkeypatch):
    weights = sum(each.numel() for each in tiny_model("qwen3", seed=0).parameters())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 40))
    published, saved = 2 * weights, (2 + 3 * 4) * weights  # in bfloat16, with moments and a copy in float32
    assert taken_of_the_host(model, monkeypatch, {}) == 4 * published + saved


@pytest.mark.nightly
@pytest.mark.slow
async def test_the_process_that_looks_tells_what_is_wrong_and_a_killed_one_is_named(model: Path, monkeypatch):
    said = await refuse_models([settings(model)])
    assert said == model_remarks([settings(model)])
    assert [remark.split()[0] for remark in said] == ["A", "Answers"]
    changed(model / "config.json", num_attention_heads=3)
    with pytest.raises(ConfigError, match=r"do not fit|must divide|divisible"):
        await refuse_models([settings(model)])
    killed = ("/bin/sh", "-c", "cat > /dev/null; kill -9 $$")
    monkeypatch.setattr(called_apart, "module_command", lambda _: killed)
    with pytest.raises(ConfigError, match=r"ended with signal SIGKILL.*memory left"):
        await refuse_models([settings(model)])


async def test_a_look_that_takes_too_long_is_the_hosts_fault(model: Path, monkeypatch):
    monkeypatch.setattr(called_apart, "module_command", lambda _: ("sleep", "600"))
    monkeypatch.setattr(model_check, "LIMIT_S", 0.1)
    with pytest.raises(ConfigError, match=r"did not end within 0\.1 s.*start again when this host is less"):
        await refuse_models([settings(model)])


# --- every config.json ---

ODD = (
    None, 0, -1, 1, 3, 7, 10**12, 1.5, float("nan"), True, "", "12", "a", [], [3], [None, None], {}, {"a": 1},
    "full_attention", ["full_attention"], {"rope_type": "yarn"}, {"factor": 0},
)  # fmt: skip
"""Values that a field of config.json may have by somebody's mistake."""


def outcome(directory: Path, backend: str) -> str:
    """Return why a model of this config.json is refused, which must fit a screen; nothing if it is not."""
    try:
        refuse_untrainable(ModelConfig(), backend, load_hf_config(directory), UNDIVIDED)
    except ConfigError as error:
        return on_a_screen(str(error))
    return ""


def mutations(config: PretrainedConfig, most: int) -> Iterator[dict]:
    """Yield contents of config.json with a field that is odd or missing, drawn by seed 0."""
    whole = json.loads(config.to_json_string(use_diff=False))
    every = [(name, value) for name in whole for value in (*ODD, "missing")]
    for name, value in random.Random(0).sample(every, min(most, len(every))):
        content = {**whole, name: value}
        if value == "missing":
            del content[name]
        yield content


def fuzzed(family: str, most: int, directory: Path) -> set[bool]:
    seen = set()
    for content in mutations(tiny_config(family), most):
        (directory / "config.json").write_text(json.dumps(content))
        seen |= {bool(outcome(directory, backend)) for backend in ("megatron", "fsdp")}
    return seen


def test_an_odd_field_is_accepted_or_refused(tmp_path: Path):
    assert fuzzed("qwen3", 25, tmp_path) == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_odd_fields_of_mixtures_are_accepted_or_refused(family: str, tmp_path: Path):
    assert fuzzed(family, 60, tmp_path) == {True, False}


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_odd_fields_of_every_family_are_accepted_or_refused(family: str, tmp_path: Path):
    assert fuzzed(family, 600, tmp_path) == {True, False}


def test_a_type_that_is_no_language_model_is_refused_on_a_screen(tmp_path: Path):
    AutoConfig.for_model("yolos").save_pretrained(tmp_path)
    assert "Unrecognized configuration class" in outcome(tmp_path, "fsdp")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", sorted(CONFIG_MAPPING))
def test_every_type_of_transformers_is_accepted_or_refused(kind: str, tmp_path: Path):
    try:
        config = AutoConfig.for_model(kind)
    except Exception as error:  # noqa: BLE001 - some configurations need others, and raise anything
        pytest.skip(f"transformers makes no default configuration of a {kind}: {error!r}")
    config.save_pretrained(tmp_path)
    if (tmp_path / "config.json").is_file():
        for backend in ("megatron", "fsdp"):
            outcome(tmp_path, backend)
