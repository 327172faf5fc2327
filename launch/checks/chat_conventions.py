"""What a model's files and template say of its chats: by which tokens answers end, and how calls are read."""

from bus.policy_names import DEFAULT_POLICY
from launch.model_files.model_directory import model_here
from launch.settings.run_config import RunConfig
from storage.disk.run_directory import RunDirectory
from storage.model_files.model_reading import read_tokenizer


def chat_remark(config: RunConfig) -> str:
    """Say by which tokens answers end and what names them, and how tool calls are read where an environment
    has tools; nothing for a model that is not on this host.

    Raises `ConfigError` where no token ends an answer, a file names what is no token, or no format reads the
    calls that the template writes."""
    model = model_here(config.model.path, RunDirectory(config.directory, config.run))
    if model is None:
        return ""
    from actors.policy.chat_format import ChatFormat  # not for help
    from storage.chats.stop_tokens import stop_tokens

    tokenizer = read_tokenizer(model)
    whose = "" if config.trains == DEFAULT_POLICY else f" of policy {config.trains!r}"
    said = f"Answers{whose} end with {', '.join(map(str, stop_tokens(model, tokenizer)))}."
    if not config.actors.offers_native_tools:
        return said
    calls = ChatFormat(tokenizer, config.actors.tool_calls).calls
    calls.refuse_unread()
    unseen = "" if calls.writes else "; the chat template itself writes none, and may not show tools"
    return f"{said} Their tool calls are read as {calls.format}{unseen}."
