"""Weights are fetched once, by a container that ends, before any shard starts: shards are offline.

The hub's token is a file in that container; TGI's program wants a variable, which the shell in there sets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import docker
import structlog

from orchestrator.errors import ConfigError, OrchestratorError, ShardError, Unreachable
from orchestrator.shards.docker.container import Bind, ImageFacts, check_environment, confined
from orchestrator.shards.docker.engine import Engine
from orchestrator.shards.docker.ground import MayAct
from orchestrator.shards.docker.images import image_facts
from orchestrator.shards.docker.ledger import nanoseconds
from orchestrator.shards.docker.listing import container_named, removed
from orchestrator.shards.docker.names import SECRETS, TASK_LABEL, container_name, labels
from orchestrator.shards.docker.refusals import sentence
from orchestrator.shards.docker.secrets import TOKEN_FILE, archive, owner_of

log = structlog.get_logger()

TASK = "weights"
POLL_S = 0.5
LOG_BYTES = 4 * 1024 * 1024
_TOKEN = f"{SECRETS}/{TOKEN_FILE}"
_TGI_REST = """
import json, os, sys
from huggingface_hub import snapshot_download
model, revision = sys.argv[1], (sys.argv[3:] or [None])[0]
rest = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
here = os.path.isdir(model)
folder = model if here else snapshot_download(model, revision=revision, allow_patterns=rest)
told = {"path": folder, "name": model, "revision": os.path.basename(folder), "dtype_hint": ""}
print(json.dumps(told), flush=True)
"""
"""TGI's program fetches weights only; a shard that is offline needs configuration and tokenizer too."""
_TGI_SCRIPT = f"""if [ -r {_TOKEN} ]; then HF_TOKEN="$(cat {_TOKEN})"; export HF_TOKEN; fi
if [ -d /usr/src/.venv/bin ]; then PATH="/usr/src/.venv/bin:$PATH"; export VIRTUAL_ENV=/usr/src/.venv; fi
text-generation-server download-weights "$@" || exit
exec python -c '{_TGI_REST}' "$@"
"""
"""As TGI's own entrypoint activates its environment."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which weights, and where they are to go."""

    image: str
    model: str
    revision: str = ""
    cache: str = "/data"
    """Folder in the container; TGI's image knows its own."""
    mounts: tuple[Bind, ...] = ()
    network: str = "bridge"
    """From which the hub can be reached."""
    user: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    """Such as HF_ENDPOINT; never a secret."""
    owner: str = ""
    token: bytes = field(default=b"", repr=False)


async def fetch(
    engine: Engine,
    deployment: str,
    wanted: Wanted,
    progress: Callable[[str], None],
    *,
    within_s: float,
    may_act: MayAct,
) -> dict[str, str]:
    """What the container said of the model: path, name, revision, dtype_hint.

    `progress` gets every line of its log.  ConfigError with its last line where it fails, Unreachable
    where it takes too long.  The container is removed in any case.
    """
    image = await image_facts(engine, wanted.image)
    body = task_body(deployment, wanted, image)
    owner = owner_of(wanted.user or image.user, image.name)
    name = container_name(deployment, TASK)
    await _make_room(engine, deployment, name, may_act)
    await may_act()
    container_id = await _created(engine, name, body)
    try:
        async with asyncio.timeout(within_s):
            if wanted.token:
                packed = archive({TOKEN_FILE: wanted.token}, owner)
                await engine.act(
                    "The hub's token was not copied", lambda c: c.api.put_archive(container_id, "/", packed)
                )
            await may_act()
            await _act(engine, lambda client: client.api.start(container_id))
            return await _followed(engine, container_id, wanted, progress)
    except TimeoutError:
        raise Unreachable(f"The weights of {wanted.model} did not come within {within_s:g} s.") from None
    finally:
        await _removed(engine, container_id, name)


def task_body(deployment: str, wanted: Wanted, image: ImageFacts) -> dict[str, Any]:
    """Of `POST /containers/create`.  ConfigError for what cannot work."""
    check_environment("The container that fetches the weights", wanted.env)
    host = confined(wanted.network, LOG_BYTES)
    host |= {"Init": True, "Mounts": [bind.mount for bind in wanted.mounts]}
    body: dict[str, Any] = {
        "Image": wanted.image,
        "Env": [
            f"{name}={value}" for name, value in ({"NVIDIA_VISIBLE_DEVICES": "void"} | {**wanted.env}).items()
        ],
        "Labels": {**labels(deployment, wanted.owner), TASK_LABEL: TASK},
        "HostConfig": host,
    }
    revision = ["--revision", wanted.revision] if wanted.revision else []
    if image.tgi:
        body["Entrypoint"] = ["/bin/sh", "-c", _TGI_SCRIPT, "download-weights"]
        body["Cmd"] = [wanted.model, *revision]
    else:
        token = ["--token-file", _TOKEN] if wanted.token else []
        body["Entrypoint"] = ["python3", "-m", "orchestrator.embedded.fetch"]
        body["Cmd"] = [wanted.model, "--cache", wanted.cache, *revision, *token]
    if wanted.user:
        body["User"] = wanted.user
    return body


async def _make_room(engine: Engine, deployment: str, name: str, may_act: MayAct) -> None:
    """An earlier start that was killed may have left its own."""
    found = await container_named(engine, name)
    if found is None:
        return
    if found.deployment != deployment or found.task != TASK:
        raise ConfigError(
            f"A container {name} exists that does not fetch weights for the deployment {deployment}: remove "
            "it, or name the deployment otherwise."
        )
    await may_act()
    await _removed(engine, found.id, name)


async def _created(engine: Engine, name: str, body: Mapping[str, Any]) -> str:
    told = await _act(
        engine,
        lambda client: client.api.create_container_from_config(  # type: ignore[no-untyped-call]
            dict(body), name
        ),
    )
    return str(told["Id"])


async def _act(engine: Engine, act: Callable[[docker.DockerClient], Any]) -> Any:
    try:
        return await engine.act("The weights cannot be fetched", act)
    except ShardError as error:
        raise ConfigError(sentence("The container for the weights", str(error)) or str(error)) from None


async def _followed(
    engine: Engine, container_id: str, wanted: Wanted, progress: Callable[[str], None]
) -> dict[str, str]:
    """Until it ends."""
    seen, last = "", ""
    while True:
        state = await engine.call(
            "The container for the weights was not inspected",
            lambda client: client.api.inspect_container(container_id)["State"],
        )
        for moment, line in await _lines_after(engine, container_id, seen):
            seen, last = moment, line
            progress(line)
        if state["Status"] in ("exited", "dead"):
            break
        await asyncio.sleep(POLL_S)
    if state["ExitCode"]:
        why = last or f"exit code {state['ExitCode']}"
        killed = " (the kernel killed it for memory)" if state.get("OOMKilled") else ""
        raise ConfigError(f"The weights of {wanted.model} were not fetched{killed}: {why}")
    return _told(last)


async def _lines_after(engine: Engine, container_id: str, seen: str) -> list[tuple[str, str]]:
    """(moment, line) of each line of the log after the moment `seen`; moments sort as text."""

    def read(client: docker.DockerClient) -> bytes:
        options: dict[str, Any] = {"since": _seconds(seen)} if seen else {}
        raw: bytes = client.api.logs(container_id, stdout=True, stderr=True, timestamps=True, **options)
        return raw

    text = (await engine.call("The log of the weights was not read", read)).decode(errors="replace")
    parted = [line.partition(" ") for line in text.splitlines()]
    return [(moment, line.rstrip()) for moment, _, line in parted if moment > seen and line.strip()]


def _seconds(moment: str) -> float:
    """A little before it: a float holds no nanoseconds."""
    return nanoseconds(moment) / 1e9 - 0.001


def _told(line: str) -> dict[str, str]:
    try:
        raw = json.loads(line)
    except ValueError:
        return {}
    return {name: str(value) for name, value in raw.items()} if isinstance(raw, dict) else {}


async def _removed(engine: Engine, container_id: str, name: str) -> None:
    try:
        await removed(engine, container_id, name)
    except OrchestratorError as error:
        log.warning("container_left", container=name, error=str(error))
