"""`launch convert ...`: converts models between formats. Loads no torch, so that help is quick."""

from pathlib import Path

from cyclopts import App

from launch.process.log_settings import configure_logging

convert = App(
    name="convert",
    help="Convert models between Hugging Face directories and checkpoints.",
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
