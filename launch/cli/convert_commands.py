"""`launch convert ...`: converts models between formats. Loads no torch, so that help is quick."""

from pathlib import Path
from typing import Literal

from cyclopts import App

from launch.process.log_settings import configure_logging

convert = App(
    name="convert",
    help="Convert models between Hugging Face directories, checkpoints, fp8 and int4.",
    help_format="plaintext",
)


@convert.command(usage="Usage: launch convert hf-to-megatron SOURCE TARGET")
def hf_to_megatron(source: Path, target: Path) -> None:
    """Write a Hugging Face directory as a checkpoint of weights only, which --model.path takes.

    The command reads and writes tensor by tensor, so the model may be larger than memory.

    Parameters
    ----------
    source
        Directory with config.json, safetensors files, and a tokenizer if there is one.
    target
        Directory to create; it appears when everything is written and verified.
    """
    from learner.backends.megatron.conversion.convert import hf_to_megatron

    configure_logging()
    print(hf_to_megatron(source, target))  # noqa: T201 - the user's terminal


@convert.command(usage="Usage: launch convert megatron-to-hf SOURCE TARGET [OPTIONS]")
def megatron_to_hf(source: Path, target: Path, *, model: Path | None = None) -> None:
    """Write the weights of a checkpoint as a Hugging Face directory.

    The command reads and writes tensor by tensor, so the model may be larger than memory.

    Parameters
    ----------
    source
        Directory of a checkpoint, or of several, of which the latest is taken.
    target
        Directory to create; it appears when everything is written and verified.
    model
        Hugging Face directory whose configuration and tokenizer are copied; without it the checkpoint's.
    """
    from learner.backends.megatron.conversion.convert import megatron_to_hf

    configure_logging()
    print(megatron_to_hf(source, target, model))  # noqa: T201 - the user's terminal


@convert.command(usage="Usage: launch convert quantise SOURCE TARGET [OPTIONS]")
def quantise(
    source: Path, target: Path, *, to: Literal["fp8_block", "fp8_ue8m0", "fp8_tensor", "int4"] = "fp8_block"
) -> None:
    """Write a Hugging Face directory with its linear layers in fp8 or int4, for inference engines.

    The command reads and writes tensor by tensor, so the model may be larger than memory.

    Parameters
    ----------
    source
        Directory with config.json and safetensors files; other files are copied.
    target
        Directory to create; it appears when everything is written and verified.
    to
        `fp8_block` has a scale for each block of 128 x 128, `fp8_ue8m0` powers of two for these, `fp8_tensor`
        one for each tensor. `int4` is compressed-tensors' layout, symmetric, with groups of 128 columns.
    """
    from learner.model_directories.quantised_directory import quantise

    configure_logging()
    print(quantise(source, target, to))  # noqa: T201 - the user's terminal


@convert.command(usage="Usage: launch convert dequantise SOURCE TARGET [OPTIONS]")
def dequantise(source: Path, target: Path, *, dtype: Literal["bfloat16", "float32"] = "bfloat16") -> None:
    """Write a Hugging Face directory in fp8, int4 or MXFP4 as one in bfloat16 or float32.

    The command reads and writes tensor by tensor, so the model may be larger than memory.

    Parameters
    ----------
    source
        Directory with config.json and safetensors files; other files are copied.
    target
        Directory to create; it appears when everything is written and verified.
    dtype
        Type of the weights that were quantised; the others stay as they are.
    """
    import torch

    from learner.model_directories.quantised_directory import dequantise

    configure_logging()
    print(dequantise(source, target, getattr(torch, dtype)))  # noqa: T201 - the user's terminal
