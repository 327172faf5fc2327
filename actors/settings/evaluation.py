"""Settings of evaluations in an actor. Loads without torch."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from actors.settings.rewards import EndpointConfig
from bus.config import Config, HttpUrl

EvaluationEngine = Literal["own", "rollout", "none"]


class ChatEndpointConfig(EndpointConfig):
    """A model behind an OpenAI-compatible endpoint, which answers held-out prompts for comparison."""

    url: HttpUrl | None = None
    """Base address of the endpoint, as https://host/v1; the path of its `protocol` is appended."""
    model: str = ""
    """Name of the model there."""
    protocol: Literal["chat", "completions"] = "chat"
    """What the server is asked: `chat` posts messages to `/chat/completions`, `completions` posts a text to
    `/completions`, for base models, which continue texts and answer no chats."""
    prompt: Literal["template", "text"] = "template"
    """Text that `completions` has continued. `template`: the chat as the run's own template writes it, which
    is what the policy sees. `text`: the contents of the messages alone, with blank lines between them."""
    stop: tuple[str, ...] = Field((), max_length=4)
    """Texts that end an answer of `completions`, besides those of the sampling: a base model may go on
    otherwise."""

    @model_validator(mode="after")
    def _is_a_model_somewhere(self) -> Self:
        if not (self.url and self.model):
            raise ValueError(f"url={self.url!r} with model={self.model!r}: an endpoint needs both")
        if self.protocol == "chat" and (self.stop or self.prompt != "template"):
            raise ValueError(
                f'stop={list(self.stop)}, prompt={self.prompt!r} with protocol="chat": they are for texts '
                'that are continued: set protocol="completions", or leave them out'
            )
        for path in ("/chat/completions", "/completions"):
            if self.url.rstrip("/").endswith(path):
                raise ValueError(f"url={self.url!r}: leave out {path}, which the protocol appends")
        return self


class EvaluatorConfig(Config):
    """How an actor answers held-out prompts."""

    engine: Literal["auto", "own", "rollout", "none"] = "auto"
    """Engine that answers held-out prompts. `own`: engines beside the others, which keep exactly the version
    asked for: those of `servers` or `urls`, or else an embedded one. `rollout`: the engines that roll out, in
    turn with rollouts, once they have that version; later versions may sample some of the tokens, and the
    result says which. `none`: this actor leaves them to others. `auto` means `own` with `only`, `servers` or
    `urls` and where the rollouts' engine is embedded, and `rollout` with `sglang`."""
    only: bool = False
    """Whether this actor does nothing but evaluate: its engines (`actors.engine`, `actors.fleet`) roll
    nothing out, and keep exactly the version asked for."""
    servers: int = Field(0, ge=0)
    """SGLang servers that the actor starts for held-out prompts alone, with the settings of `actors.engine`,
    on the GPUs after those of its other engines."""
    urls: tuple[HttpUrl, ...] = ()
    """SGLang servers that run already, as http://host:port, for held-out prompts alone. They are given the
    weights of each version that is evaluated."""
    endpoints: dict[str, ChatEndpointConfig] = Field(default_factory=dict)
    """Models behind OpenAI-compatible endpoints by name, for data sets with `answered_by`. Any server will
    do, since only its texts count; the policy itself needs engines that take its weights and tokens."""
    prompts_at_once: int = Field(64, ge=1)
    """Most held-out prompts at a time on the engines that roll out: rollouts wait for no more than these."""

    @field_validator("engine", mode="before")
    @classmethod
    def _older_records_have_no_value(cls, value: object) -> object:
        """Records of runs of older builds have null where the choice is left to the actor."""
        return "auto" if value is None else value

    @property
    def has_own_servers(self) -> bool:
        """Return whether SGLang servers beside the rollouts' answer held-out prompts."""
        return self.servers > 0 or bool(self.urls)

    @model_validator(mode="after")
    def _no_server_is_named_twice(self) -> Self:
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError(f"urls={list(self.urls)} names a server twice: leave one out")
        if self.urls and self.servers:
            raise ValueError(f"servers={self.servers} beside urls={list(self.urls)}: leave out one of them")
        return self

    @model_validator(mode="after")
    def _engines_are_of_one_kind(self) -> Self:
        given = [name for name in ("only", "servers", "urls") if getattr(self, name)]
        if given and self.engine not in ("auto", "own"):
            raise ValueError(
                f"engine={self.engine!r} with {given[0]}: these are engines of its own: leave out one of them"
            )
        if self.only and self.has_own_servers:
            raise ValueError(
                f"only=true with {given[1]}: the engines of such an actor are those of actors.engine: set "
                "actors.engine.urls or actors.fleet.engines instead"
            )
        return self
