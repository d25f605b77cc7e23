"""What a server can be told, with defaults in one place. Knows nothing of models."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Literal, get_args

from dsde.core.errors import InvalidInput

MetricsLevel = Literal["none", "summary", "detailed"]
LogFormat = Literal["text", "json"]


@dataclass(frozen=True)  # without slots: the command line takes its own defaults from the class
class ServerSettings:
    model_name: str = "dsde"
    """what requests call the model"""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any that is free"""
    api_keys: tuple[str, ...] = ()
    """one of them must come with every request, if there are any"""
    cors_origins: tuple[str, ...] = ()
    """web pages that may call from a browser; none by default"""
    dashboard: bool = True
    max_queue: int = 1024
    """sequences that may wait beside those that run; whoever comes then is told to come back later"""
    max_output_tokens: int | None = None
    """most tokens a request may ask for; None: what the context leaves"""
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 30.0
    """for a request to arrive as a whole"""
    request_timeout_s: float = 600.0
    """from a request's arrival to the end of its answer"""
    drain_timeout_s: float = 30.0
    """after SIGTERM, for those under way to finish"""
    spec_decode_metrics: MetricsLevel = "none"
    """what answers tell of speculation, unless a request asks for more or less"""
    log_format: LogFormat = "text"
    log_prompts: bool = False
    otlp_endpoint: str | None = None
    """where OpenTelemetry traces go; None: nowhere"""

    def __post_init__(self) -> None:
        _check_whole("port", self.port, 0, 65535)
        _check_whole("max_queue", self.max_queue, 0)
        _check_whole("max_body_bytes", self.max_body_bytes, 1)
        if self.max_output_tokens is not None:
            _check_whole("max_output_tokens", self.max_output_tokens, 1)
        for name in ("body_timeout_s", "request_timeout_s", "drain_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidInput(f"{name} must be a number of seconds of at least 0, got {value!r}.")
        for name, allowed in (("spec_decode_metrics", get_args(MetricsLevel)), ("log_format", get_args(LogFormat))):
            if getattr(self, name) not in allowed:
                raise InvalidInput(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        if any(not key for key in self.api_keys):
            raise InvalidInput("An API key must not be empty.")

    @property
    def is_loopback(self) -> bool:
        """Whether nobody outside this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _check_whole(name: str, value: int, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidInput(f"{name} must be a whole number {allowed}, got {value!r}.")
