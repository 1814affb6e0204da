"""From a stock TGI container to settings that serve the same: what each value is, and why.

Pure.  Nothing that looks like a secret gets into values, comments or notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.carried import HUB_TOKENS, Carried, carried, hub_folder, mount_of
from orchestrator.core.gpu_split import Split, ranks_of, resolved, split
from orchestrator.core.launcher_flags import DEFAULT_MODEL
from orchestrator.core.moving_notes import KEYS_FILE, TOKEN_FILE, key_notes, remarks, token_notes
from orchestrator.core.secret_names import repeats_secret
from orchestrator.core.stock import DEFAULT_SHM_BYTES, Stock, joined

LONG_TOKENS = 32_768
"""From here on the rings of the arena take gigabytes."""
ANSWER_TOKENS = 1024
"""Room for an answer where nothing tells how long it may be."""
NAME_CHARACTERS = 64
ROLES = ("prefill", "decode", "mixed")
LIMITS = {
    "max-input-tokens": "max_input_tokens",
    "max-total-tokens": "max_total_tokens",
    "max-batch-prefill-tokens": "max_batch_prefill_tokens",
    "max-concurrent-requests": "max_concurrent_requests",
    "payload-limit": "payload_bytes",
}


@dataclass(frozen=True, slots=True)
class Here:
    """What is known of this machine beside the container."""

    port: int
    """A free one, for the gateway."""
    gpus: tuple[str, ...] | None = None
    """UUIDs by index; None where NVML cannot be asked."""
    info: Mapping[str, Any] | None = None
    """What the container answers to `/info`; None where it does not."""


@dataclass(slots=True)
class Moved:
    """Settings by dotted key, a comment for some of them, and sentences about the rest."""

    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, comment: str = "") -> None:
        self.values[key] = value
        if comment:
            self.comments[key] = comment


def moved(stock: Stock, here: Here) -> Moved:
    """ConfigError for a value that the launcher itself would have refused."""
    out, taken = Moved(), carried(stock)
    out.put("version", 1)
    out.put("deployment", stock.name[:NAME_CHARACTERS], "Named after the container.")
    _model(out, stock)
    out.put("launcher", "docker", f"Containers on the engine that runs {stock.name}.")
    _shards(out, stock, taken, here)
    _gateway(out, stock, here)
    _limits(out, stock, here)
    out.notes += remarks(stock, taken)
    return _without(out, taken.secrets)


# --- the model ----------------------------------------------------------------------------------


def _model(out: Moved, stock: Stock) -> None:
    told = stock.told
    model = told.one("model-id")
    if model is None:
        out.notes.append(f"The container names no model, so TGI serves its default, {DEFAULT_MODEL}.")
    out.put("model.id", _on_this_host(model, stock, out) if model else DEFAULT_MODEL)
    if revision := told.one("revision"):
        out.put("model.revision", revision)
    if (dtype := told.one("dtype")) == "bfloat16":
        out.put("model.dtype", dtype)
    elif not stock.gpus:
        out.put("model.dtype", "float32", "What TGI computes in where there is no GPU, unless told.")
    if token := next((name for name in HUB_TOKENS if stock.env.get(name)), None):
        out.put("model.token_file", TOKEN_FILE, f"In place of {token}: a file that only you can read.")
        out.notes += token_notes(stock, token)
    if stock.gpus:
        _cache(out, stock)


def _on_this_host(model: str, stock: Stock, out: Moved) -> str:
    """A hub id as it is; a path of the container as this host has it, with a note where that is no use."""
    if not model.startswith("/"):
        return model
    mount = mount_of(model, stock.mounts)
    if mount is None:
        out.notes.append(f"{model} is in the container only: copy it to this host and name it in model.id.")
        return model
    if mount.volume:
        out.notes.append(
            f"The model is in the volume {mount.volume}, which the engine keeps in {mount.source}: "
            "copy it to a folder that you may read and name that one in model.id."
        )
    return joined(mount.source, mount.below(model) or "")


def _cache(out: Moved, stock: Stock) -> None:
    """The mount that holds the hub's files: shards have it at /data, as TGI's image expects it."""
    mount = mount_of(hub_folder(stock), stock.mounts)
    if mount is not None and mount.volume:
        out.notes.append(
            f"The weights are in the volume {mount.volume}, which the engine keeps in {mount.source}: "
            "as root you may name that folder in model.cache, else they are fetched again."
        )
    elif mount is not None:
        out.put("model.cache", mount.source, "The container's own weights.")


# --- the shards ---------------------------------------------------------------------------------


def _shards(out: Moved, stock: Stock, taken: Carried, here: Here) -> None:
    visible = stock.env.get("CUDA_VISIBLE_DEVICES")
    gpus, unresolved = resolved(stock.gpus, here.gpus, visible)
    tp = ranks_of(stock.told, stock.gpus, here.gpus, visible)
    plan = split(gpus, tp)
    out.comments["shards"] = plan.why if stock.gpus else "One CPU shard for prompts, one for answers."
    for role in ROLES:
        _role(out, stock, taken, role, plan, tp)
    out.notes += filter(None, (unresolved, *plan.notes))
    if gpus:
        out.notes.append(
            f"{stock.name} holds {', '.join(gpus)} while it runs: stop it before `up`, or name other GPUs "
            "to compare side by side."
        )
    if not stock.gpus:
        out.notes.append("The container uses no GPU, so the embedded CPU shard stands in for TGI.")


def _role(out: Moved, stock: Stock, taken: Carried, role: str, plan: Split, tp: int) -> None:
    at = f"shards.{role}"
    groups = [list(group) for group in getattr(plan, role)]
    out.put(f"{at}.count", len(groups) if plan.placed else int(role != "mixed"))
    optional = {
        "gpus": groups,
        "tp": tp if tp > 1 else 0,
        "args": list(taken.arguments) if stock.gpus else [],
        "env": dict(taken.env),
        "shm_bytes": stock.shm_bytes if stock.shm_bytes != DEFAULT_SHM_BYTES else 0,
    }
    for name, value in optional.items():
        if value:
            out.put(f"{at}.{name}", value)


# --- the gateway and the limits -----------------------------------------------------------------


def _gateway(out: Moved, stock: Stock, here: Here) -> None:
    old = stock.published
    beside = f" beside {stock.name}, which has port {old.port}," if old else ""
    out.put(
        "gateway.listen", f"127.0.0.1:{here.port}", f"For this machine alone,{beside} until traffic moves."
    )
    keys = bool(stock.told.one("api-key"))
    if keys:
        out.put("gateway.keys_file", KEYS_FILE, "In place of TGI's API_KEY.")
        out.notes += key_notes(stock)
    if old:
        host = old.host or "0.0.0.0"
        as_open = not keys and not host.startswith("127.")
        open_too = ", and gateway.allow_anonymous: true to stay as open as TGI is" if as_open else ""
        out.notes.append(
            f"To move traffic: stop {stock.name}, set gateway.listen: {host}:{old.port}{open_too}, "
            "and start the deployment again."
        )


def _limits(out: Moved, stock: Stock, here: Here) -> None:
    told = {key: stock.told.number(flag) for flag, key in LIMITS.items()}
    told["max_input_tokens"] = told["max_input_tokens"] or stock.told.number("max-input-length")
    found = _lengths(told["max_input_tokens"], told["max_total_tokens"], here.info or {})
    for key, given in told.items():
        if given is not None:
            out.put(f"limits.{key}", given)
        elif key in found:
            out.put(f"limits.{key}", *found[key])
    longest = out.values.get("limits.max_input_tokens")
    if longest is None:
        out.notes.append(
            f"Nothing tells the longest prompt that {stock.name} takes: TGI chose it by its memory, here it "
            "is 4095 tokens (limits.max_input_tokens). Compare with its /info."
        )
    elif longest >= LONG_TOKENS:
        out.notes.append(
            f"Prompts of {longest} tokens need large rings in shared memory: lower limits.max_input_tokens "
            "where none is so long, or set arena.bytes."
        )


def _lengths(inputs: int | None, total: int | None, info: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """(value, comment) of the two limits of length that the launcher was not told."""
    answered = (info.get("max_input_tokens"), info.get("max_total_tokens"))
    one, other = inputs or answered[0], total or answered[1]
    if isinstance(one, int) and isinstance(other, int) and one < other:
        why = "Chosen by TGI at its start: what its /info says."
        return {"max_input_tokens": (one, why), "max_total_tokens": (other, why)}
    if total is not None and inputs is None:
        return {"max_input_tokens": (max(total - 1, 1), "TGI's own default: one less than max_total_tokens.")}
    if inputs is not None and total is None:
        why = f"TGI chose it by its memory; here {ANSWER_TOKENS} more than a prompt. Compare with its /info."
        return {"max_total_tokens": (inputs + ANSWER_TOKENS, why)}
    return {}


def _without(out: Moved, secrets: frozenset[str]) -> Moved:
    """The last gate: what still repeats a secret goes, and a note says which key."""

    def clean(value: Any) -> bool:
        return not repeats_secret(str(value), secrets)

    gone = [key for key, value in out.values.items() if not clean(value)]
    return Moved(
        {key: value for key, value in out.values.items() if key not in gone},
        {key: text for key, text in out.comments.items() if clean(text) and key not in gone},
        [note for note in out.notes if clean(note)]
        + [f"{key} is left out: the container has a secret in it." for key in gone],
    )
