"""Put and get inside a model: export the prompt's KV, or import it instead of computing it.

Nothing here raises for a bridge's sake: a failure is counted by reason and becomes a local prefill.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tgi_patches.bridge import Bridge, FirstToken, Planes
from tgi_patches.contract import BridgeMiss, GetTag, MissReason, PutTag
from tgi_patches.kv import Inbox


class Warn(Protocol):
    """Writes one event to the log."""

    def __call__(self, event: str, /, **facts: str) -> object: ...


@dataclass(slots=True)
class Imported:
    """A record whose KV is where the model reads it."""

    first: FirstToken
    inbox: Inbox

    def repair(self) -> None:
        """After the one-token forward, see Inbox.repair."""
        self.inbox.repair()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What a put leg leaves behind."""

    planes: Planes
    first: FirstToken
    ended: bool
    """The request is complete with its first token."""


class Relay:
    """A shard's use of the bridge, with its counters."""

    def __init__(
        self,
        bridge: Bridge,
        *,
        published: Callable[[str], None],
        failed: Callable[[str, MissReason], None],
        warn: Warn,
    ) -> None:
        self._bridge = bridge
        self._published = published
        self._failed = failed
        self._warn = warn
        self.exports: Counter[str] = Counter()
        self.imports: Counter[str] = Counter()

    def put(self, tag: PutTag, token_ids: Sequence[int], outgoing: Callable[[], Outgoing]) -> None:
        """Publish the KV of the whole prompt and its first token."""
        try:
            record = outgoing()
            content = content_ids(token_ids, tag.adapter)
            self._bridge.export(tag.handle, content, record.first, record.ended, record.planes)
        except BridgeMiss as miss:
            self.not_put(tag, miss.reason, str(miss))
        except Exception as error:  # noqa: BLE001 - the shard must answer whatever the bridge does
            self.not_put(tag, MissReason.ERROR, repr(error))
        else:
            self.exports["ok"] += 1
            self._published(tag.handle)

    def not_put(self, tag: PutTag, reason: MissReason, detail: str) -> None:
        """Count an export that did not happen and tell whoever waits for it."""
        self.exports[str(reason)] += 1
        self._warn("kv_export_failed", handle=tag.handle, reason=str(reason), detail=detail)
        self._failed(tag.handle, reason)

    def get(
        self, tag: GetTag, token_ids: Sequence[int], inbox: Callable[[], Inbox]
    ) -> tuple[Imported | None, str]:
        """Give the record to the model through `inbox`.  (what was imported, `hit`) or (None, why not)."""
        try:
            imported = self._read(tag, token_ids, inbox)
        except BridgeMiss as miss:
            return None, self.not_got(tag, miss.reason, str(miss))
        except Exception as error:  # noqa: BLE001 - the shard must answer whatever the bridge does
            return None, self.not_got(tag, MissReason.ERROR, repr(error))
        self.imports["hit"] += 1
        return imported, "hit"

    def not_got(self, tag: GetTag, reason: MissReason, detail: str) -> str:
        """Count an import that did not happen; its reason."""
        self.imports[str(reason)] += 1
        self._warn("kv_import_missed", handle=tag.handle, reason=str(reason), detail=detail)
        return str(reason)

    def _read(self, tag: GetTag, token_ids: Sequence[int], inbox: Callable[[], Inbox]) -> Imported:
        record = self._bridge.lookup(tag.shard, tag.epoch, tag.handle)
        if record.token_ids != content_ids(token_ids, tag.adapter):
            raise BridgeMiss(MissReason.TOKENS_DIFFER, "the record is of another prompt or another adapter")
        opened = inbox()
        self._bridge.read_into(record, opened.planes, len(token_ids))
        opened.commit()
        return Imported(record.first, opened)


def content_ids(token_ids: Sequence[int], adapter: str) -> tuple[int, ...]:
    """What a record's KV is of: the prompt's tokens, the first one mixed with the adapter's name.

    The same prompt has other keys and values under another adapter.  Ids are 32-bit in a record.
    """
    if not adapter or not token_ids:
        return tuple(token_ids)
    salt = int.from_bytes(hashlib.blake2b(adapter.encode(), digest_size=4).digest(), "little")
    return (token_ids[0] ^ salt, *token_ids[1:])
