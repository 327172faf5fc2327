"""The small files of a model directory (config, tokenizer, chat template) as one message."""

from pathlib import Path

from bus.messages import ModelFiles

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})


def bundle(directory: Path) -> ModelFiles:
    """Everything in `directory` but weights and folders."""
    files = sorted(p for p in directory.iterdir() if p.is_file() and p.suffix not in WEIGHT_SUFFIXES)
    return ModelFiles(names=tuple(p.name for p in files), contents=tuple(p.read_bytes() for p in files))


def unbundle(files: ModelFiles, directory: Path) -> None:
    """Write the files into `directory`, made if missing; a name never leads out of it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in zip(files.names, files.contents, strict=True):
        (directory / Path(name).name).write_bytes(content)
