"""Gateways that keep a queue of undecided tickets standing: `... load URL CONDUCTOR-PID STANDING`.

Whatever is granted has its record imported and ends at once, and a new ticket takes its place.  Raw
pipelines over one blocking connection.  It says how many tickets were decided, and the conductor's CPU time
then, twice a second until SIGTERM.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import hiredis
import orjson

from orchestrator.bench.gateway import proc
from orchestrator.bench.scheduler.control import DEPLOYMENT
from orchestrator.bench.scheduler.fleet import COSTS
from orchestrator.bench.scheduler.workload import ANSWERS, PROMPTS
from orchestrator.core.ticket import Choice, Completion, Grant, Leg, Outcome, Relayed, Ticket
from orchestrator.queues import calls
from orchestrator.queues.calls import Call
from orchestrator.queues.keys import Keys

GATEWAYS = ("gateway-0.1", "gateway-1.1", "gateway-2.1", "gateway-3.1")
SAY_EVERY_S = 0.5
READ_MOST = 256
"""Grants per stream and read: small enough that a gateway's answer is never long in coming."""
BLOCK_MS = 50
DEADLINE_S = 10.0
LIFE_S = 3600.0
KINDS = 256
"""Lengths of prompts and answers that take turns."""
_HANDLE = "f" * 32
_MARK = 1_111_111_111_111_111_111
"""A similarity fingerprint whose decimals are exchanged."""


def resp(*parts: str | bytes | int) -> bytes:
    """One command as Redis reads it."""
    pieces = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    body = b"".join(b"$%d\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"*%d\r\n%b" % (len(pieces), body)


def script(call: Call) -> bytes:
    return resp("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)


class Link:
    """A blocking connection for pipelines."""

    def __init__(self, url: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(DEADLINE_S)
        self._socket.connect(url.removeprefix("unix://"))
        self._reader = hiredis.Reader(encoding="utf-8")

    def say(self, commands: Sequence[bytes]) -> list[Any]:
        """Replies in order; raises the first error among them."""
        self._socket.sendall(b"".join(commands))
        replies: list[Any] = []
        while len(replies) < len(commands):
            reply = self._reader.gets()
            if reply is False:
                self._reader.feed(self._socket.recv(1 << 20))
                continue
            if isinstance(reply, hiredis.ReplyError):
                raise reply
            replies.append(reply)
        return replies


class Load:
    """The tickets, and what is said of each."""

    def __init__(self, link: Link) -> None:
        self.decided = 0
        self._link = link
        self._keys = Keys(DEPLOYMENT)
        self._chance = random.Random(0)
        self._count = 0
        self._submissions = [self._submission(number) for number in range(KINDS)]
        self._read_to = dict.fromkeys(map(self._keys.grants, GATEWAYS), "0-0")
        self._gateways = dict(zip(self._read_to, GATEWAYS, strict=True))

    def begin(self, standing: int) -> None:
        """The gateways live, and the queue stands."""
        alive = [resp("SET", self._keys.gateway(name), "1", "EX", int(LIFE_S)) for name in GATEWAYS]
        self._link.say([*alive, resp("SADD", self._keys.gateways, *GATEWAYS)])
        for _ in range(standing // READ_MOST + 1):
            self._link.say(list(self._tickets(READ_MOST)))

    def turn(self) -> None:
        """Read what was granted; end it and put as many new tickets into the queue."""
        streams = ("STREAMS", *self._read_to, *self._read_to.values())
        (found,) = self._link.say([resp("XREAD", "COUNT", READ_MOST, "BLOCK", BLOCK_MS, *streams)])
        commands: list[bytes] = []
        for stream, entries in found or ():
            self._read_to[stream] = entries[-1][0]
            for _, fields in entries:
                commands += self._ends(self._gateways[stream], orjson.loads(fields[1]))
            commands += self._tickets(len(entries))
            self.decided += len(entries)
        if commands:
            self._link.say(commands)

    def waiting(self) -> int:
        """Undecided tickets now."""
        (count,) = self._link.say([resp("XLEN", self._keys.tickets)])
        return int(count)

    # --- what is said ---------------------------------------------------------------------------

    def _submission(self, number: int) -> bytes:
        now_s = time.time()
        ticket = Ticket(
            _HANDLE,
            GATEWAYS[number % len(GATEWAYS)],
            PROMPTS.draw(self._chance),
            1024,
            created_s=now_s,
            deadline_s=now_s + LIFE_S,
            model="bench",
            prompt_hash=_HANDLE,
            simhash=_MARK,
        )
        return script(calls.submit(self._keys, ticket, 1 << 30))

    def _tickets(self, count: int) -> Iterator[bytes]:
        for _ in range(count):
            self._count += 1
            mark = self._chance.randrange(10**18, 9 * 10**18)
            template = self._submissions[self._count % KINDS]
            handle = b"%032x" % self._count
            yield template.replace(_HANDLE.encode(), handle).replace(b"%d" % _MARK, b"%d" % mark)

    def _ends(self, gateway: str, granted: dict[str, Any]) -> list[bytes]:
        handle = granted["handle"].encode()
        if "refused" in granted:
            return []
        decode = granted["decode"]
        has_record = granted["prefill"] is not None
        templates = _ending(
            self._keys, gateway, granted["kv_tokens"], decode["shard"], decode["epoch"], has_record
        )
        return [template.replace(_HANDLE.encode(), handle) for template in templates]


@lru_cache(maxsize=65_536)
def _ending(
    keys: Keys, gateway: str, kv_tokens: int, shard: str, epoch: int, has_record: bool
) -> tuple[bytes, ...]:
    """What is said of a granted request, with phases that fit the cost model."""
    assert COSTS.prefill is not None, "the bench has a cost model"
    assert COSTS.decode is not None, "the bench has a cost model"
    prompt_tokens = max(kv_tokens - 1024, 1)
    answer_tokens = round(ANSWERS.median)
    prefill_s = COSTS.prefill.alone_s(prompt_tokens)
    decode_s = answer_tokens * COSTS.decode.step_s(8, 8 * prompt_tokens)
    phases = {"queue": 0.01, "prefill": prefill_s, "relay": 0.01, "decode_wait": 0.02, "decode": decode_s}
    end = Completion(
        _HANDLE, Outcome.DONE, phases, prompt_tokens, answer_tokens, imported=has_record, first_token_s=0.0
    )
    ended = script(calls.complete(keys, gateway, end))
    if not has_record:
        return (ended,)
    held = Grant(_HANDLE, Choice.SEPARATED, "pair", Leg(shard, epoch, ""), None, kv_tokens, 0, 1024)
    told = Relayed(_HANDLE, time.time(), prefill_s, 0.01, prompt_tokens)
    return script(calls.relayed(keys, gateway, replace(held), told)), ended


def main(url: str, conductor_pid: int, standing: int, now: Callable[[], float] = time.perf_counter) -> None:
    """Until SIGTERM."""
    load = Load(Link(url))
    load.begin(standing)
    said_s = 0.0
    while True:
        if now() - said_s >= SAY_EVERY_S:
            said_s = now()
            cpu_s = proc.cpu_s([conductor_pid])
            facts = {"decided": load.decided, "conductor_cpu_s": cpu_s, "at_s": said_s}
            sys.stdout.write(json.dumps({**facts, "waiting": load.waiting()}) + "\n")
            sys.stdout.flush()
        load.turn()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
