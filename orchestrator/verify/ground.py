"""What a stock TGI and a deployment must have in common before their answers can be compared.

Same model and revision, limits that refuse nobody who is served now, every route, the same token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import httpx

from orchestrator.errors import Unreachable
from orchestrator.verify import texts
from orchestrator.verify.asking import get_json

Json = Mapping[str, Any]

LIMITS = (
    "max_input_tokens",
    "max_total_tokens",
    "max_best_of",
    "max_stop_sequences",
    "max_client_batch_size",
)
"""Of `/info`: a client that keeps to the reference's must not be refused by the deployment."""

_ONE_TOKEN = {"inputs": "A", "parameters": {"max_new_tokens": 1}}
_TURN = {"model": "tgi", "messages": [{"role": "user", "content": "A"}], "max_tokens": 1}
ROUTES: tuple[tuple[str, str, Json | None], ...] = (
    ("GET", "/health", None),
    ("GET", "/ping", None),
    ("GET", "/v1/models", None),
    ("POST", "/", _ONE_TOKEN),
    ("POST", "/generate", _ONE_TOKEN),
    ("POST", "/generate_stream", _ONE_TOKEN),
    ("POST", "/v1/chat/completions", _TURN),
    ("POST", "/v1/completions", {"model": "tgi", "prompt": "A", "max_tokens": 1}),
    ("POST", "/tokenize", {"inputs": "A"}),
    ("POST", "/chat_tokenize", _TURN),
)
TEXTS = {
    **texts.SCRIPTS,
    "emoji": texts.EMOJI,
    "scripts in one line": texts.MIXED_SCRIPTS,
    "code": texts.CODE,
    "white space": texts.WHITESPACE,
    "a passage": texts.PASSAGE,
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing on both sides.  `problem` is a sentence where they part, else empty."""

    what: str
    separated: str
    reference: str
    problem: str = ""
    ends: bool = False
    """Nothing further can be compared."""

    @property
    def ok(self) -> bool:
        return not self.problem


async def common_ground(
    separated: httpx.AsyncClient, reference: httpx.AsyncClient, seen: Callable[[Check], None]
) -> list[Check]:
    """Stops at another model.  Unreachable where a side does not answer, or not as TGI does."""
    ours, theirs = await get_json(separated, "/info"), await get_json(reference, "/info")
    done: list[Check] = []

    def note(check: Check) -> None:
        done.append(check)
        seen(check)

    for check in _by_info(ours, theirs):
        note(check)
        if check.ends:
            return done
    note(await _routes(separated, reference))
    note(await _token_ids(separated, reference))
    return done


def _by_info(ours: Json, theirs: Json) -> Iterator[Check]:
    yield _model(ours, theirs)
    yield _revision(ours, theirs)
    for key in LIMITS:
        if isinstance(theirs.get(key), int):
            yield _limit(key, ours.get(key), theirs[key])
    yield Check("version", str(ours.get("version", "")), str(theirs.get("version", "")))


def _model(ours: Json, theirs: Json) -> Check:
    """Hub ids must be the same; of two folders, or a folder and an id, only the last part is compared."""
    one, other = str(ours.get("model_id", "")), str(theirs.get("model_id", ""))
    ids = all("/" in name and not name.startswith("/") for name in (one, other))
    if one == other if ids else PurePosixPath(one).name == PurePosixPath(other).name:
        return Check("model", one, other)
    problem = f"The models differ: the deployment serves {one}, the reference {other}."
    return Check("model", one, other, problem, ends=True)


def _revision(ours: Json, theirs: Json) -> Check:
    """Only where both tell the same kind: of a local folder TGI tells none, the embedded shard a digest."""
    one, other = (str(info.get("model_sha") or "") for info in (ours, theirs))
    problem = ""
    if len(one) == len(other) and one != other:
        problem = (
            f"The revisions differ: the deployment serves {one}, the reference {other} (model.revision)."
        )
    return Check("revision", one or "not told", other or "not told", problem)


def _limit(key: str, ours: Any, theirs: int) -> Check:
    problem = ""
    if not isinstance(ours, int) or ours < theirs:
        problem = f"{key} is {ours} here and {theirs} there: requests that are served now would be refused."
    return Check(key, str(ours), str(theirs), problem)


async def _routes(separated: httpx.AsyncClient, reference: httpx.AsyncClient) -> Check:
    """Every route that the reference serves."""
    served, missing = 0, []
    for method, path, body in ROUTES:
        if not httpx.codes.is_success(await _status(reference, method, path, body)):
            continue
        served += 1
        if not httpx.codes.is_success(status := await _status(separated, method, path, body)):
            missing.append(f"{method} {path} answers {status}")
    problem = f"Routes that the reference serves are missing: {'; '.join(missing)}." if missing else ""
    return Check("routes", f"{served - len(missing)} served", f"{served} served", problem)


async def _status(client: httpx.AsyncClient, method: str, path: str, body: Json | None) -> int:
    try:
        return (await client.request(method, path, json=body)).status_code
    except httpx.TransportError as error:
        raise Unreachable(
            f"{client.base_url} does not answer {path}: {str(error) or type(error).__name__}."
        ) from error


async def _token_ids(separated: httpx.AsyncClient, reference: httpx.AsyncClient) -> Check:
    """`/tokenize` of texts in many scripts; a server that does not serve it cannot be compared so."""
    counted = 0
    for name, text in TEXTS.items():
        theirs = await _ids(reference, text)
        if theirs is None:
            return Check("token ids", "", "not served")
        ours = await _ids(separated, text)
        if ours != theirs:
            return Check(
                "token ids",
                "",
                "",
                f"The tokenizers differ, first in the text {name!r}{_where(ours, theirs)}.",
            )
        counted += len(theirs)
    return Check("token ids", f"{counted} in {len(TEXTS)} texts", "the same")


async def _ids(client: httpx.AsyncClient, text: str) -> list[Any] | None:
    answer = await client.post("/tokenize", json={"inputs": text})
    if not answer.is_success:
        return None
    listed = answer.json()
    return [token.get("id") for token in listed] if isinstance(listed, list) else None


def _where(ours: list[Any] | None, theirs: list[Any]) -> str:
    if ours is None:
        return ", which the deployment does not tokenize"
    at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f": {len(ours)} tokens here, {len(theirs)} at the reference"
    return f" at token {at}: {ours[at]} here, {theirs[at]} at the reference"
