"""The contract between the orchestrator and its shards.

Standard library only: a TGI container imports it before torch, the gateway without torch at all.
Holds the protocol version, roles, the fingerprint, the shard spec, the handle as it travels and
the messages of the sidecar.  Nothing here does I/O.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

PROTOCOL_VERSION = 1
"""Version N reads what N-1 wrote and refuses anything else."""

OVERLAY_VERSION = "4"
"""Changes when the bytes or the meaning of a KV record change; part of every fingerprint."""

SPEC_VARIABLE = "ORCHESTRATOR_SHARD_SPEC"
EPOCH_VARIABLE = "ORCHESTRATOR_SHARD_EPOCH"
"""The epoch of a shard whose server process is another than the one that minted it."""
STRICT_VARIABLE = "ORCHESTRATOR_TGI_STRICT"
"""`1`: a server that the overlay does not know refuses to start instead of serving mixed only."""
PARENT_VARIABLE = "ORCHESTRATOR_PARENT_PID"
"""Set for a shard that must not outlive the process that launched it."""
KEY_VARIABLE = "ORCHESTRATOR_DEPLOYMENT_KEY"
"""The secret that the sidecars and gateways of one deployment share; never in a spec, label or log."""
KEY_FILE_VARIABLE = "ORCHESTRATOR_DEPLOYMENT_KEY_FILE"
"""A file that holds it, instead."""
IMPORTS_METADATA = "x-orchestrator-imports"
"""gRPC metadata after a Prefill with get legs: JSON, `hit` or the reason by request id."""
TOP_TOKENS_MAX = 11
"""Of a record: a request asks for 5 at most, and tokens that tie with the last one come along."""
TAG_MARK = "|kv"
PULLED_SUFFIX = ".pulled"
"""Copies of other hosts' records stand in arenas that are named as a shard of their own."""

_PART = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HANDLE = re.compile(r"[0-9a-f]{32}")


class ContractError(ValueError):
    """What the other side sent does not follow the contract; the text is one sentence for a user."""


class Role(StrEnum):
    """What a shard is launched for; every shard runs the same code."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class MissReason(StrEnum):
    """Why a record was not used.  Each one is counted and costs a local prefill."""

    MISSING = "missing"
    OVERWRITTEN = "overwritten"
    EPOCH = "epoch"
    FINGERPRINT = "fingerprint"
    CHECKSUM = "checksum"
    TOKENS_DIFFER = "tokens_differ"
    LAYOUT = "layout"
    UNSUPPORTED = "unsupported"
    PINNED_FULL = "pinned_full"
    LINK = "link"
    """The way from another host broke, or took too long."""
    RANKS = "ranks"
    """Another rank of the same shard could not use its part."""
    ERROR = "error"


class BridgeMiss(Exception):
    """A record cannot be used.  Always counted, always a local prefill, never a wrong answer."""

    def __init__(self, reason: MissReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason


def check_protocol(peer: int) -> None:
    """Refuse a peer whose protocol is neither ours nor the one before."""
    if peer not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
        raise ContractError(
            f"The other side speaks protocol {peer} and this side {PROTOCOL_VERSION}: "
            "upgrade the older one (only one version apart is supported)."
        )


def new_epoch() -> int:
    """A number for this incarnation of a shard: the 64-bit wall clock in nanoseconds."""
    return time.time_ns()


def new_handle() -> str:
    """128 random bits, hex: the name of one request's KV record."""
    return secrets.token_hex(16)


def checked_part(value: str, what: str) -> str:
    """`value` if it is safe in a file name and in a tag, else ContractError."""
    if not _PART.fullmatch(value) or value in (".", ".."):
        raise ContractError(f"The {what} {value!r} must be 1 to 64 characters of A-Z a-z 0-9 _ . -")
    return value


# --- the handle as it travels -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PutTag:
    """Ask a shard to export the prompt's KV under `handle`.  `[adapter]|kv1:put:<handle>`, or `pin`"""

    handle: str
    adapter: str = ""
    pinned: bool = False
    """Keep it for its time to live whatever comes later; only for a shard whose status has `pinned_bytes`."""

    def __str__(self) -> str:
        verb = "pin" if self.pinned else "put"
        return f"{self.adapter}{TAG_MARK}{PROTOCOL_VERSION}:{verb}:{self.handle}"


@dataclass(frozen=True, slots=True)
class GetTag:
    """Ask a shard to import a record.  `[adapter]|kv1:get:<shard>.<epoch>:<handle>:<token id or ->`"""

    handle: str
    shard: str
    epoch: int
    first_token_id: int | None = None
    """With which the answer has begun; None: the shard samples it, also where it finds the record."""
    adapter: str = ""

    def __str__(self) -> str:
        first = "-" if self.first_token_id is None else self.first_token_id
        source = f"{self.shard}.{self.epoch}"
        return f"{self.adapter}{TAG_MARK}{PROTOCOL_VERSION}:get:{source}:{self.handle}:{first}"


Tag = PutTag | GetTag


def carries_tag(value: str) -> bool:
    """True for an `adapter_id` or `model` that only the gateway may send."""
    return TAG_MARK in value


def parse_tag(value: str | None) -> Tag | None:
    """The tag inside an `adapter_id` or `model`; None where there is none; ContractError if broken."""
    if not value or TAG_MARK not in value:
        return None
    adapter, _, rest = value.rpartition(TAG_MARK)
    version, _, rest = rest.partition(":")
    if not version.isdecimal():
        raise ContractError("The KV handle in the adapter name has no protocol version.")
    check_protocol(int(version))
    match rest.split(":"):
        case ["put" | "pin" as verb, handle]:
            return PutTag(checked_handle(handle), adapter, pinned=verb == "pin")
        case ["get", source, handle, first]:
            shard, _, epoch = source.rpartition(".")
            if not epoch.isdecimal() or not (first == "-" or first.isdecimal()):
                raise ContractError("The KV handle in the adapter name has a broken epoch or first token.")
            return GetTag(
                handle=checked_handle(handle),
                shard=checked_part(shard, "shard name"),
                epoch=int(epoch),
                first_token_id=None if first == "-" else int(first),
                adapter=adapter,
            )
        case _:
            raise ContractError("The KV handle in the adapter name is neither a put nor a get.")


def checked_shard(name: str, *, pulls: bool) -> str:
    """`name` if a shard may have it, else ContractError; `pulls` leaves room for the suffix of its copies."""
    checked_part(name, "shard name")
    if name.endswith(PULLED_SUFFIX):
        raise ContractError(f"A shard's name must not end in {PULLED_SUFFIX!r}.")
    if pulls:
        checked_part(name + PULLED_SUFFIX, "name of a shard that pulls, with its suffix,")
    return name


def checked_handle(handle: str) -> str:
    """`handle` if it is 32 hexadecimal digits, else ContractError."""
    if not _HANDLE.fullmatch(handle):
        raise ContractError("A KV handle must be 32 hexadecimal digits.")
    return handle


# --- what two shards must share -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What decides whether one shard may use another's KV.

    The first group is content and must be equal; the second is geometry and must be convertible.
    """

    model: str
    revision: str
    tokenizer: str
    dtype: str
    kv_dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    quantization: str = ""
    rope: str = ""
    adapters: str = ""
    overlay: str = OVERLAY_VERSION
    # geometry
    attention: str = "embedded"
    block_size: int = 16
    tensor_parallel: int = 1

    GEOMETRY = ("attention", "block_size", "tensor_parallel")

    def difference(self, other: Fingerprint) -> str | None:
        """One sentence that names the first content field that differs; None if the pair may form."""
        for name in self.content():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"The shards differ in {name}: {mine!r} against {theirs!r}."
        return None

    def content(self) -> dict[str, Any]:
        """The fields that must be equal, by name."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in Fingerprint.GEOMETRY
        }

    def digest(self) -> str:
        """16 hex digits over the content; stands in every arena's header."""
        text = json.dumps(self.content(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- messages -----------------------------------------------------------------------------------


class Message:
    """JSON for the frozen dataclasses below; unknown keys are ignored (protocol N reads N-1)."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if not isinstance(raw, Mapping):
            raise ContractError(f"A {cls.__name__} message must be a JSON object.")
        try:
            return cls(**{key: value for key, value in raw.items() if key in known})
        except (TypeError, ValueError) as error:
            raise ContractError(f"A {cls.__name__} message is not complete: {error}") from None


@dataclass(frozen=True, slots=True)
class Limits(Message):
    """TGI's limits of a shard; tokens and counts."""

    max_input_tokens: int
    max_total_tokens: int
    max_concurrent_requests: int = 128
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_best_of: int = 2
    max_client_batch_size: int = 4
    payload_bytes: int = 2_000_000


@dataclass(frozen=True, slots=True)
class ShardSpec(Message):
    """A launch order.  Travels as one JSON environment variable; holds no secret and no epoch."""

    deployment: str
    shard: str
    role: Role
    model: str
    """A local folder, or a hub id."""
    model_name: str
    """What clients see as `model_id`."""
    revision: str = ""
    dtype: str = "float32"
    host: str = "127.0.0.1"
    port: int = 0
    cpus: tuple[int, ...] = ()
    """CPU cores the process may use; empty for all."""
    arena_dir: str = ""
    arena_bytes: int = 0
    """Size of this shard's own ring; 0 for a shard that only reads."""
    record_ttl_s: float = 60.0
    kv_pool_tokens: int = 0
    """Tokens the KV pool holds; 0 lets the shard choose."""
    max_input_tokens: int = 4095
    max_total_tokens: int = 4096
    max_batch_prefill_tokens: int = 4096
    max_concurrent_requests: int = 128
    chunked_prefill: bool = False
    """Split prompts at `max_batch_prefill_tokens` a step, so that running requests step along."""
    prefix_caching: bool = False
    tgi_python: str = ""
    """An interpreter with TGI's server: the shard drives that server instead of its own engine."""
    tgi_env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of that server, on top of the shard's own; never a secret."""
    tensor_parallel: int = 1
    """Ranks of the model; each has the arena and the KV of its own heads."""
    sidecar_port: int = 0
    """Of a sidecar that is a process of its own; 0 where it answers on `port`."""
    pull_listen: str = ""
    """`host:port` at which records are offered to other hosts (port 0: any); empty: nowhere."""
    pulled_bytes: int = 0
    """Ring of this shard's copies of records from other hosts, all ranks together; 0: it pulls nothing."""
    pinned_bytes: int = 0
    """Beside the ring, all ranks together: for pinned records; 0: none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", Role(self.role))
        object.__setattr__(self, "cpus", tuple(self.cpus))
        checked_part(self.deployment, "deployment name")
        checked_shard(self.shard, pulls=self.pulled_bytes > 0)
        if self.tensor_parallel < 1:
            raise ContractError(f"tensor_parallel must be at least 1, not {self.tensor_parallel}.")
        if not 0 < self.max_input_tokens < self.max_total_tokens:
            raise ContractError(
                f"max_input_tokens ({self.max_input_tokens}) must be below "
                f"max_total_tokens ({self.max_total_tokens})."
            )

    @property
    def pull_host(self) -> str:
        """Host of `pull_listen`, an IPv6 address in brackets; empty where that is every address, or none."""
        host = self.pull_listen.rpartition(":")[0]
        return "" if host.strip("[]") in ("", "0.0.0.0", "::") else host

    def to_env(self) -> dict[str, str]:
        return {SPEC_VARIABLE: json.dumps(self.to_dict())}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        try:
            raw = json.loads(env[SPEC_VARIABLE])
        except KeyError:
            raise ContractError(f"The variable {SPEC_VARIABLE} is not set.") from None
        except json.JSONDecodeError as error:
            raise ContractError(f"The variable {SPEC_VARIABLE} is not JSON: {error}") from None
        return cls.from_dict(raw)


@dataclass(frozen=True, slots=True)
class StatusReply(Message):
    """A sidecar's answer to `status`."""

    protocol: int
    deployment: str
    shard: str
    role: Role
    epoch: int
    fingerprint: Fingerprint
    limits: Limits
    kv_tokens: int
    """Tokens the shard's KV pool holds."""
    slots: int
    """Requests it decodes at once."""
    ring_bytes: int
    record_limit_bytes: int
    bytes_per_token: int
    """KV bytes of one token, all layers, this shard's dtype."""
    running: int = 0
    waiting: int = 0
    kv_tokens_used: int = 0
    exports: Mapping[str, int] = field(default_factory=dict)
    """Count by result: `ok`, `pinned`, `kept` (of a long answer, for itself), or a MissReason."""
    imports: Mapping[str, int] = field(default_factory=dict)
    """Count by result: `hit`, `resumed` (a long answer), or a MissReason."""
    hooked: bool = True
    """False when the overlay refused to hook this server: such a shard serves only mixed."""
    note: str = ""
    """Where it did not hook, the reason in a sentence."""
    arena_id: str = ""
    """Of the folder that its arenas are in: shards with the same one read each other's records."""
    pull_port: int = 0
    """Where other hosts pull its records, on the host that answers this; 0: nowhere."""
    pull_host: str = ""
    """Address at which other hosts pull, where it is not that of its URL."""
    pulls: bool = False
    """It can fetch records from other hosts."""
    relaunch: str = ""
    """Why this incarnation should be replaced as soon as its requests are done; empty: it should not."""
    imported_tokens: int = 0
    """Prompt tokens of get legs whose KV came from records."""
    recomputed_tokens: int = 0
    """Prompt tokens of get legs that this shard computed: misses, and what a record did not hold."""
    pinned_bytes: int = 0
    """Room for pinned records; 0 also for a shard that does not know the `pin` tag."""

    def __post_init__(self) -> None:
        check_protocol(self.protocol)
        object.__setattr__(self, "role", Role(self.role))
        if isinstance(self.fingerprint, Mapping):
            object.__setattr__(self, "fingerprint", Fingerprint(**self.fingerprint))
        if isinstance(self.limits, Mapping):
            object.__setattr__(self, "limits", Limits.from_dict(self.limits))


@dataclass(frozen=True, slots=True)
class PullRequest(Message):
    """Asks a decode shard's sidecar to fetch a record from the sidecar that has it."""

    protocol: int
    handle: str
    shard: str
    """Whose record it is."""
    epoch: int
    address: str
    """`host:port` of that shard's sidecar."""
    timeout_s: float = 5.0
    signature: str = ""
    """`key.sign` over `signed()`; empty where the deployment has no key."""

    def __post_init__(self) -> None:
        check_protocol(self.protocol)
        checked_handle(self.handle)
        checked_part(self.shard, "shard name")

    def signed(self) -> tuple[str, ...]:
        """What the signature covers, in order."""
        return ("pull", self.handle, self.shard, str(self.epoch), self.address)


@dataclass(frozen=True, slots=True)
class PullReply(Message):
    """A sidecar's answer to `pull`: where the record stands now."""

    protocol: int
    handle: str
    found: bool
    shard: str = ""
    """What the get tag has to name as the record's shard, and its epoch."""
    epoch: int = 0
    kv_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    """Why `found` is false: a MissReason."""

    def __post_init__(self) -> None:
        check_protocol(self.protocol)


@dataclass(frozen=True, slots=True)
class WaitReply(Message):
    """A sidecar's answer to `wait`: what the put leg left behind."""

    protocol: int
    handle: str
    found: bool
    """False when nothing was published in time; the get leg then prefills locally."""
    first_token_id: int | None = None
    ended: bool = False
    """The request was complete with its first token: it never reaches decode."""
    kv_bytes: int = 0
    prompt_tokens: int = 0
    reason: str = ""
    """Why `found` is false: a MissReason."""

    def __post_init__(self) -> None:
        check_protocol(self.protocol)
