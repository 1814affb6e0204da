"""Who may come in: keys, limits, the admin's token, priorities.  One `Visit` per request."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import structlog

from orchestrator.access.exposure import check_exposure, is_loopback
from orchestrator.access.keys import (
    PRIORITIES,
    ApiKey,
    KeyRing,
    checked_key,
    key_ring,
    read_secret,
    shown_digest,
)
from orchestrator.access.routes import Door, NotFound, door
from orchestrator.access.tally import Tally
from orchestrator.access.window import first_step, retry_after_s, step_of
from orchestrator.config import API_KEYS_VARIABLE
from orchestrator.errors import ConfigError, InvalidRequest, Overloaded, Unauthorized
from orchestrator.settings import GatewaySection

log = structlog.get_logger()

PRIORITY_HEADER = b"x-orchestrator-priority"
_BY_HEADER = {name.encode(): number for name, number in PRIORITIES.items()}
_REQUESTS, _TOKENS = 0, 1
_KEY, _ADMIN, _HEALTH = Door.KEY, Door.ADMIN, Door.HEALTH
"""Looked up once: an enum's members are slow to reach."""


class Visit:
    """A request that was let in."""

    __slots__ = ("key_name", "priority")

    def __init__(self, key_name: str, priority: int) -> None:
        self.key_name = key_name
        self.priority = priority

    def leave(self, tokens: int = 0) -> None:
        """The request is over, after `tokens` of prompt and answer.  Once; later calls do nothing."""


class LimitedVisit(Visit):
    """One that counts against its key's limits until it leaves."""

    __slots__ = ("_at", "_leave")

    def __init__(self, key_name: str, priority: int, at: int, leave: Callable[[int, int], None]) -> None:
        super().__init__(key_name, priority)
        self._at = at
        self._leave: Callable[[int, int], None] | None = leave

    def leave(self, tokens: int = 0) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave(self._at, tokens)


class Access:
    """The keys and limits of one gateway process."""

    def __init__(
        self,
        gateway: GatewaySection,
        env: Mapping[str, str],
        tally: Tally,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway = gateway
        self._variable = env.get(API_KEYS_VARIABLE, "")
        self._tally: Tally | None = tally
        self._now_s = now_s
        self._local = is_loopback(gateway.host)
        self._admin_local = is_loopback(gateway.admin_host)
        self._ring: KeyRing | None = None
        self._rows: dict[str, tuple[int, int]] = {}
        self._admin: bytes | None = None
        # Without limits nothing is counted, and one visit serves every request.
        self._anybody = {priority: Visit("", priority) for priority in PRIORITIES.values()}

    @classmethod
    def open(
        cls,
        gateway: GatewaySection,
        env: Mapping[str, str],
        shared: Path | None = None,
        worker: int = 0,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Reads keys and token.  ConfigError in one sentence.

        `shared` is a folder of all workers of this gateway, which are numbered from 0; their clock is one.
        """
        check_exposure(gateway, env)
        access = cls(gateway, env, Tally(shared, worker, gateway.workers), now_s)
        try:
            access._read_keys()
            access._read_token()
        except ConfigError:
            access.close()
            raise
        return access

    @classmethod
    def anybody(cls) -> Self:
        """No keys, no limits, no token."""
        return cls(GatewaySection(), {}, Tally(None, 0, 1))

    def reload(self) -> None:
        """Read keys and token again; what cannot be read stays as it was."""
        for read, what in ((self._read_keys, "api_keys"), (self._read_token, "admin_token")):
            try:
                read()
            except ConfigError as error:
                log.error("not_reloaded", what=what, error=str(error))

    def close(self) -> None:
        """Visits that are still open may leave afterwards."""
        tally, self._tally = self._tally, None
        if tally is not None:
            tally.close()

    # --- a request ------------------------------------------------------------------------------

    def visit(
        self, method: str, path: str, headers: Mapping[bytes, bytes], *, admin_port: bool = False
    ) -> Visit:
        """Who asks.  Raises Unauthorized, Overloaded (with `retry_after`), NotFound or InvalidRequest."""
        at = door(method, path)
        if at is _KEY and not admin_port:
            return self._with_key(headers)
        if at is _ADMIN:
            self._let_admin_in(headers, admin_port)
        elif admin_port and at is not _HEALTH:
            raise NotFound("Not Found")
        return self._anybody[0]

    def _with_key(self, headers: Mapping[bytes, bytes]) -> Visit:
        if self._ring is None:
            return self._anybody[_asked(headers) if PRIORITY_HEADER in headers else 0]
        key = self._ring.whose(headers.get(b"authorization"))
        if key is None:
            raise _unauthorized(headers)
        asked = _asked(headers) if PRIORITY_HEADER in headers else 0
        priority = asked if asked < key.priority else key.priority
        row = self._rows.get(key.name)
        return Visit(key.name, priority) if row is None else self._counted(key, priority, *row)

    def _let_admin_in(self, headers: Mapping[bytes, bytes], admin_port: bool) -> None:
        if self._gateway.admin_listen and not admin_port:
            raise NotFound("Not Found")
        if self._admin is not None:
            if not _shows(self._admin, headers):
                raise _unauthorized(headers)
            return
        if self._ring is None or (self._admin_local if admin_port else self._local):
            return
        if self._ring.whose(headers.get(b"authorization")) is None:
            raise _unauthorized(headers)

    # --- limits ---------------------------------------------------------------------------------

    def _counted(self, key: ApiKey, priority: int, name: int, at: int) -> Visit:
        """Counted first and looked at then: of two workers that do so at once, one sees the other."""
        tally, now_s = self._tally, self._now_s()
        if tally is None:
            raise Overloaded("The gateway is shutting down.", "1")
        step = step_of(now_s)
        tally.add(at, step, requests=1, opened=1)
        refused = self._refused(tally, key, name, at, now_s)
        if refused is not None:
            tally.add(at, step, requests=-1, opened=-1)
            refused.key_name = key.name
            raise refused
        return LimitedVisit(key.name, priority, at, self._left)

    def _refused(self, tally: Tally, key: ApiKey, name: int, at: int, now_s: float) -> Overloaded | None:
        """The sentence for a request too many; this one is counted already."""
        limits, first = key.limits, first_step(step_of(now_s))
        if (most := limits.concurrent_requests) is not None and (
            tally.open_requests(name, at) > most and tally.open_requests(name, at, checked=True) > most
        ):
            return Overloaded(f"The API key {key.name} has {most} requests under way, its most.", "1")
        if (most := limits.requests_per_minute) is not None and (
            tally.used_from(name, at, first, _REQUESTS) > most
        ):
            after_s = retry_after_s(now_s, most, lambda step: tally.used_from(name, at, step, _REQUESTS))
            return Overloaded(f"The API key {key.name} may ask {most} times a minute.", str(after_s))
        if (most := limits.tokens_per_minute) is not None and (
            tally.used_from(name, at, first, _TOKENS) >= most
        ):
            after_s = retry_after_s(now_s, most - 1, lambda step: tally.used_from(name, at, step, _TOKENS))
            return Overloaded(f"The API key {key.name} has used its {most} tokens a minute.", str(after_s))
        return None

    def _left(self, at: int, tokens: int) -> None:
        if self._tally is not None:
            self._tally.add(at, step_of(self._now_s()), tokens=max(tokens, 0), opened=-1)

    # --- files ----------------------------------------------------------------------------------

    def _read_keys(self) -> None:
        ring = key_ring(self._gateway.keys_file, self._variable)
        limited = [key.name for key in ring.keys.values() if key.limits.any] if ring else []
        if self._tally is not None:
            self._rows = self._tally.take(limited, step_of(self._now_s()))
        self._ring = ring
        if ring is not None:
            log.info("api_keys_read", names=sorted(ring.keys))

    def _read_token(self) -> None:
        path = self._gateway.admin_token_file
        if path is not None:
            token = read_secret(path, "admin token file").strip()
            self._admin = checked_key(token, f"The token in {path}")


def _asked(headers: Mapping[bytes, bytes]) -> int:
    """The priority that a request asks for."""
    try:
        return _BY_HEADER[headers[PRIORITY_HEADER]]
    except KeyError:
        raise InvalidRequest(
            f"The header {PRIORITY_HEADER.decode()} must be `high`, `normal` or `low`."
        ) from None


def _shows(digest: bytes, headers: Mapping[bytes, bytes]) -> bool:
    shown = shown_digest(headers.get(b"authorization"))
    return shown is not None and hmac.compare_digest(digest, shown)


def _unauthorized(headers: Mapping[bytes, bytes]) -> Unauthorized:
    if b"authorization" in headers:
        return Unauthorized("The key in the header `authorization` is not known.")
    return Unauthorized("A key is needed: `authorization: Bearer KEY`.")
