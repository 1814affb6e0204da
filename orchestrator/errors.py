"""Every error that the orchestrator raises on purpose.

OrchestratorError
├── ConfigError              what the user wrote cannot be used; exit code 2
├── Unreachable              a deployment, Redis or a shard does not answer; exit code 3
├── GatewayError             an answer to a client, in TGI's error shape
│   ├── Unauthorized         401 unauthorized
│   ├── InvalidRequest       422 validation
│   ├── BodyTooSlow          408 validation
│   ├── TooLarge             413 validation
│   ├── Overloaded           429 overloaded
│   │   └── Shed             the same, by the deployment's mode
│   ├── GenerationFailed     424 generation
│   ├── ShardLost            502 generation
│   ├── Unavailable          503 generation
│   └── DeadlinePassed       504 generation
└── ShardError               a shard did not do what it was asked; translated before a client sees it

Beside it stands `tgi_patches.contract.BridgeMiss(reason)`: a KV record was not used.  The overlay
raises and counts it; it never leaves a shard.
"""

from __future__ import annotations


class OrchestratorError(Exception):
    """The root; its text is one sentence for a user."""

    exit_code = 1


class ConfigError(OrchestratorError):
    exit_code = 2


class Unreachable(OrchestratorError):
    exit_code = 3


class GatewayError(OrchestratorError):
    """Knows its HTTP status and TGI's `error_type`."""

    status = 500
    error_type = "generation"
    key_name = ""
    """Of the API key whose limit was met."""

    def body(self) -> dict[str, str]:
        """TGI's error body."""
        return {"error": str(self), "error_type": self.error_type}


class Unauthorized(GatewayError):
    """No API key, or one that is not known."""

    status = 401
    error_type = "unauthorized"


class InvalidRequest(GatewayError):
    status = 422
    error_type = "validation"


class BodyTooSlow(GatewayError):
    """The request's body did not come in time."""

    status = 408
    error_type = "validation"


class TooLarge(GatewayError):
    status = 413
    error_type = "validation"


class Overloaded(GatewayError):
    """Too much at once; `retry_after` is for the header of that name, in whole seconds."""

    status = 429
    error_type = "overloaded"

    def __init__(self, text: str, retry_after: str | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class Shed(Overloaded):
    """The deployment's mode keeps what is left for requests of a higher priority."""

    def __init__(self, priority: str) -> None:
        super().__init__(
            f"The deployment is degraded and serves only requests of priority {priority} or higher now: "
            "try again later.",
            retry_after="5",
        )


class GenerationFailed(GatewayError):
    status = 424


class ShardLost(GatewayError):
    """The shard that served the request went away."""

    status = 502


class Unavailable(GatewayError):
    """No shard can serve the request now."""

    status = 503


class DeadlinePassed(GatewayError):
    status = 504


class ShardError(OrchestratorError):
    pass
