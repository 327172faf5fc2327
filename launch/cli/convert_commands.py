"""`launch convert ...`: converts models between formats. Loads no torch, so that help is quick."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from launch.process.log_settings import configure_logging

if TYPE_CHECKING:
    from learner.convert.written_directory import Converted

convert = App(
    name="convert",
    help="Convert models between Hugging Face directories, checkpoints, fp8 and int4; read GGUF files, take "
    "text models out of others.",
    help_format="plaintext",
)
ModelDirectory = Annotated[
    Path, Parameter(help="Directory with config.json and safetensors files; other files are copied.")
]
Checkpoint = Annotated[
    Path,
    Parameter(help="Directory of a checkpoint, or of several or of a run, of which the latest is taken."),
]
CopiedModel = Annotated[
    Path | None,
    Parameter(
        help="Hugging Face directory whose configuration and tokenizer are copied; without it those "
        "of the checkpoint, or the tokenizer of the model of its run."
    ),
]
Target = Annotated[
    Path, Parameter(help="Directory to create; it appears when everything is written and verified.")
]


@convert.command(usage="Usage: launch convert hf-to-megatron SOURCE TARGET")
def hf_to_megatron(source: Path, target: Target) -> None:
    """Write a Hugging Face directory as a checkpoint of weights only, which --model.path takes.

    Parameters
    ----------
    source
        Directory with config.json, safetensors files, and a tokenizer if there is one.
    """
    from learner.convert.megatron import hf_to_megatron

    configure_logging()
    _tell(hf_to_megatron(source, target))


@convert.command(usage="Usage: launch convert megatron-to-hf SOURCE TARGET [OPTIONS]")
def megatron_to_hf(source: Checkpoint, target: Target, *, model: CopiedModel = None) -> None:
    """Write the weights of a checkpoint as a Hugging Face directory."""
    from learner.convert.megatron import megatron_to_hf

    _convert_checkpoint(megatron_to_hf, source, target, model)


@convert.command(usage="Usage: launch convert fsdp-to-hf SOURCE TARGET [OPTIONS]")
def fsdp_to_hf(source: Checkpoint, target: Target, *, model: CopiedModel = None) -> None:
    """Write the weights of a checkpoint of learner.backend=fsdp as a Hugging Face directory, in float32."""
    from learner.convert.fsdp import fsdp_to_hf

    _convert_checkpoint(fsdp_to_hf, source, target, model)


def _convert_checkpoint(
    write: "Callable[..., Converted]", source: Path, target: Path, model: Path | None
) -> None:
    from launch.run_view.source_run import described_by, newest_checkpoint

    configure_logging()
    found = newest_checkpoint(source)
    begun_from = described_by(found) if model is None else None
    _tell(write(found, target, model, begun_from=begun_from))


def _tell(converted: "Converted") -> None:
    from launch.model_files.model_directory import lack_of_chat

    print(converted)  # noqa: T201 - the user's terminal
    if lack := lack_of_chat(converted.directory):
        print(f"warning: no prompt can be asked as it is: {lack}")  # noqa: T201 - the user's terminal


@convert.command(usage="Usage: launch convert gguf FILE TARGET [OPTIONS]")
def gguf(file: Path, target: Target, *, dtype: Literal["bfloat16", "float32"] = "bfloat16") -> None:
    """Write the model of a GGUF file, with its tokenizer and chat template, as a Hugging Face directory.

    All weights are in memory at once. Needs the packages gguf and accelerate.

    Parameters
    ----------
    file
        GGUF file of an architecture that transformers reads, quantised or not.
    dtype
        Type of the weights in the directory.
    """
    import torch

    from learner.convert.gguf_file import convert_gguf

    configure_logging()
    _tell(convert_gguf(file, target, getattr(torch, dtype)))


@convert.command(usage="Usage: launch convert text-model SOURCE TARGET")
def text_model(source: ModelDirectory, target: Target) -> None:
    """Write the text model inside a multimodal one, with its tokenizer, as a Hugging Face directory."""
    from learner.convert.text_directory import convert_text_model

    configure_logging()
    _tell(convert_text_model(source, target))


@convert.command(usage="Usage: launch convert quantise SOURCE TARGET [OPTIONS]")
def quantise(
    source: ModelDirectory,
    target: Target,
    *,
    to: Literal["fp8_block", "fp8_ue8m0", "fp8_tensor", "fp8_channel", "int4"] = "fp8_block",
) -> None:
    """Write a Hugging Face directory with its linear layers in fp8 or int4, for inference engines.

    Parameters
    ----------
    to
        `fp8_block` has a scale for each block of 128 x 128, `fp8_ue8m0` powers of two for these, `fp8_tensor`
        one for each tensor. In compressed-tensors' layouts, `fp8_channel` has one for each row, and `int4`,
        symmetric, one for each 128 columns of a row.
    """
    from learner.convert.quantised_directory import quantise

    configure_logging()
    _tell(quantise(source, target, to))


@convert.command(usage="Usage: launch convert dequantise SOURCE TARGET [OPTIONS]")
def dequantise(
    source: ModelDirectory, target: Target, *, dtype: Literal["bfloat16", "float32"] = "bfloat16"
) -> None:
    """Write a Hugging Face directory in fp8, int4 or MXFP4 as one in bfloat16 or float32.

    Parameters
    ----------
    dtype
        Type of the weights that were quantised; the others stay as they are.
    """
    import torch

    from learner.convert.quantised_directory import dequantise

    configure_logging()
    _tell(dequantise(source, target, getattr(torch, dtype)))
