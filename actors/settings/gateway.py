"""Settings of the recording gateway. Loads without torch."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from bus.config import Config

Pin = Literal["temperature", "top_p", "top_k"]


class RequestRule(Config):
    """What becomes of requests that fit all of its patterns, in which `*` stands for any text."""

    model: str | None = None
    """Pattern of the model that a request names, such as `*haiku*`."""
    system: str | None = None
    """Pattern of its system message, such as `You are a title generator*`."""
    agent: str | None = None
    """Pattern of the name of its agent, such as `subagent-*`."""
    trained: bool = True
    """Whether the answers are trained. Titles and summaries that the reward says nothing of should not be."""
    policy: str = ""
    """Name of the policy that answers, among actors.opponents and policies; empty for the run's own."""
    as_agent: str = Field("", pattern=r"^[\w.-]{0,64}$")
    """Name of its agent in the recording; empty for the one that it has."""


class GatewayConfig(Config):
    """HTTP server by which an agent written by somebody else asks the policy, which records it."""

    host: str = "127.0.0.1"
    """Address to listen at. Without `certificate` requests travel in the clear: whoever can read them can
    speak for a session."""
    port: int = Field(0, ge=0, le=65535)
    """Port to listen on; 0 takes any that is free, which agents find in their environment."""
    certificate: Path | None = None
    """File of the server's certificate and its chain, as PEM; with it the gateway speaks TLS only."""
    certificate_key: Path | None = None
    """File of the certificate's private key, as PEM."""
    advertise: str | None = None
    """URL by which clients reach the gateway, if it is another than where it listens, such as that of a
    proxy. `{port}` in it stands for the port, as in `http://actors.example:{port}` with `port = 0`."""
    model: str = "policy"
    """Name of the policy in `/v1/models`; requests may name any model."""
    pinned: tuple[Pin, ...] = ("temperature", "top_p", "top_k")
    """Sampling that an agent cannot change: the run's own holds. An agent may always ask for fewer tokens
    than `sampling.max_new_tokens`, and never gets more."""
    unmeetable: Literal["refuse", "ignore"] = "refuse"
    """What becomes of a request for a schema of the answer or for the likeliest tokens, which are not given:
    it is refused by name, or answered without."""
    most_turns: int = Field(64, ge=1)
    """Completions of one session. Further requests are refused, and its episode ends by `turn_limit`."""
    most_tokens: int | None = Field(None, ge=1)
    """Sampled tokens of one session. Requests after them are refused, and its episode ends by `length`."""
    policies: tuple[str, ...] = ()
    """Names among actors.opponents and policies that a request may choose by `X-Sluice-Policy`. What the
    policy runs may ask them too, and those of rules: they must not know the answers."""
    rules: tuple[RequestRule, ...] = ()
    """Which requests are untrained, or answered by another policy: the first rule that fits holds."""
    tool_hook: str | None = None
    """Function that lets pass, changes or denies each tool call, as `my_pkg.my_module:function`."""
    keep_alive_s: float = Field(5.0, gt=0)
    """Time after which an answer that is still being generated says so to a client that streams."""
    retry_grace_s: float = Field(2.0, ge=0)
    """Time for which a generation goes on when its client has gone and may ask again; the retry joins it."""
    most_body_bytes: int = Field(8 << 20, ge=1024)
    """Largest body of a request."""
    body_timeout_s: float = Field(30.0, gt=0)
    """Longest time that a client may take to send a body."""

    @property
    def policies_named(self) -> tuple[str, ...]:
        """Return the policies that may answer requests, beside the run's own."""
        return (*self.policies, *(rule.policy for rule in self.rules if rule.policy))

    @model_validator(mode="after")
    def _a_certificate_has_its_key(self) -> Self:
        if (self.certificate is None) != (self.certificate_key is None):
            raise ValueError("certificate and certificate_key are of no use alone: give both, or none")
        return self
