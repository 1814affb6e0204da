"""The flags of TGI's launcher, in all their spellings: what each one becomes when TGI moves in here.

From `launcher/src/main.rs` of TGI v3.3.7: every flag has an environment variable of the same name, and
the flag wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.core.secret_names import names_secret
from orchestrator.errors import ConfigError

LAUNCHER = "text-generation-launcher"
DEFAULT_PORT = 3000
DEFAULT_MODEL = "bigscience/bloom-560m"


class Becomes(StrEnum):
    SETTING = "setting"
    """A key of ours."""
    SHARED = "shared"
    """The same flag for every shard."""
    OURS = "ours"
    """Decided by the orchestrator for each shard."""
    GATEWAY = "gateway"
    """Something between TGI and its clients, where the gateway stands now."""


_SETTINGS = (
    "model-id revision dtype num-shard sharded max-input-tokens max-input-length max-total-tokens "
    "max-batch-prefill-tokens max-concurrent-requests huggingface-hub-cache weights-cache-override port "
    "payload-limit"
)
_SHARED = (
    "quantize speculate kv-cache-dtype trust-remote-code max-best-of max-stop-sequences max-top-n-tokens "
    "waiting-served-ratio max-batch-total-tokens max-waiting-tokens max-batch-size disable-custom-kernels "
    "cuda-memory-fraction rope-scaling rope-factor json-output otlp-endpoint otlp-service-name "
    "watermark-gamma watermark-delta tokenizer-config-path disable-grammar-support validation-workers "
    "max-client-batch-size lora-adapters usage-stats enable-prefill-logprobs graceful-termination-timeout"
)
_OURS = "hostname shard-uds-path master-addr master-port prometheus-port cuda-graphs env"
_GATEWAY = "cors-allow-origin api-key ngrok ngrok-authtoken ngrok-edge"

FLAGS: Mapping[str, Becomes] = {
    **dict.fromkeys(_SETTINGS.split(), Becomes.SETTING),
    **dict.fromkeys(_SHARED.split(), Becomes.SHARED),
    **dict.fromkeys(_OURS.split(), Becomes.OURS),
    **dict.fromkeys(_GATEWAY.split(), Becomes.GATEWAY),
}
SWITCHES = frozenset(
    {
        *("trust-remote-code", "disable-custom-kernels", "json-output", "ngrok"),
        *("disable-grammar-support", "enable-prefill-logprobs", "env"),
    }
)
"""Flags without a value."""
_SHORT = {"-p": "port", "-g": "graceful-termination-timeout", "-e": "env"}
_OFF = frozenset({"", "0", "n", "no", "f", "false", "off"})
"""What a switch's variable may hold to leave it off."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a launcher was told, by the flag's name without dashes; a switch that is on holds `true`."""

    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    """Names of flags that TGI v3.3.7 does not have."""
    hidden: tuple[str, ...] = ()
    """Values of those that look like secrets: to be kept out of everything."""

    def one(self, name: str) -> str | None:
        values = self.values.get(name)
        return values[-1] if values else None

    def number(self, name: str) -> int | None:
        """ConfigError for what is no whole number above 0: the launcher would not have started with it."""
        value = self.one(name)
        if value is None:
            return None
        if not value.isascii() or not value.isdecimal() or not int(value):
            raise ConfigError(f"The container's --{name} ({variable_of(name)}) is no whole number above 0.")
        return int(value)

    def those(self, becomes: Becomes) -> dict[str, tuple[str, ...]]:
        """In the order of `FLAGS`."""
        return {name: self.values[name] for name in FLAGS if FLAGS[name] is becomes and name in self.values}


def variable_of(name: str) -> str:
    """The environment variable of a flag."""
    return name.upper().replace("-", "_")


def told(arguments: Sequence[str], env: Mapping[str, str]) -> Told:
    """Flags first, then variables, as the launcher has it."""
    given, unknown = _from_arguments(arguments)
    for name in FLAGS:
        value = env.get(variable_of(name))
        if name in given or value is None or name == "env":
            continue
        if name in SWITCHES:
            value = "" if value.lower() in _OFF else "true"
        if value:
            given[name] = (value,)
    hidden = tuple(value for name, value in unknown if names_secret(name))
    return Told(given, tuple(name for name, _ in unknown), hidden)


def as_arguments(values: Mapping[str, Sequence[str]]) -> list[str]:
    """`--flag value` for each, switches alone."""
    said: list[str] = []
    for name, each in values.items():
        for value in each:
            said += [f"--{name}"] if name in SWITCHES else [f"--{name}", value]
    return said


def _from_arguments(
    arguments: Sequence[str],
) -> tuple[dict[str, tuple[str, ...]], list[tuple[str, str]]]:
    """(values by flag, (name, value) of unknown ones)."""
    given: dict[str, tuple[str, ...]] = {}
    unknown: list[tuple[str, str]] = []
    rest = list(arguments)
    while rest:
        name, value = _split(rest.pop(0))
        if name in SWITCHES:
            value = value or "true"
        elif name and value is None and rest and (name in FLAGS or not rest[0].startswith("-")):
            value = rest.pop(0)
        if name in FLAGS and value is not None:
            given[name] = (*given.get(name, ()), value)
        elif name and name not in FLAGS:
            unknown.append((name, value or ""))
    return given, unknown


def _split(word: str) -> tuple[str, str | None]:
    """(name, value where it stands in the same word); no name for a word that is no flag."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        return name, value if equals else None
    name = _SHORT.get(word[:2], "")
    return name, word[2:].removeprefix("=") if name and len(word) > 2 else None
