"""What a model's files and template say of its chats: by which tokens answers end."""

from bus.errors import ConfigError
from bus.policy_names import DEFAULT_POLICY
from launch.config import RunConfig
from launch.process.model_directory import model_here
from storage.disk.run_directory import RunDirectory


def chat_remark(config: RunConfig) -> str:
    """Say by which tokens answers end and what names them; nothing for a model that is not on this host.

    Raises `ConfigError` where no token ends an answer, or a file names what is no token."""
    model = model_here(config.model.path, RunDirectory(config.directory, config.run))
    if model is None:
        return ""
    from transformers import AutoTokenizer  # not for help

    from storage.chats.stop_tokens import stop_tokens

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model}: its tokenizer cannot be read: {error}") from error
    whose = "" if config.trains == DEFAULT_POLICY else f" of policy {config.trains!r}"
    return f"Answers{whose} end with {', '.join(map(str, stop_tokens(model, tokenizer)))}."
