"""A follower: rank 1 or up of a shard.  `python -m ...ranks.follower FD`, started by rank 0 alone.

It carries out what it reads from the socket FD, in order, until that closes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from orchestrator.embedded.shard.process import die_with_parent, log_to_stderr, pin

from .channel import Channel, ChannelClosed
from .cores import cores_of
from .messages import Command, Done, Join, Reply, Start
from .verdict import done, failed

if TYPE_CHECKING:
    from orchestrator.embedded.shard.loading import Loaded

    from .part import Part


def main(fd: int) -> int:
    # What tells the shard to stop reaches its whole group; rank 0 lets running requests finish first.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    log_to_stderr()
    die_with_parent(signal.SIGKILL)
    return asyncio.run(follow(socket.socket(fileno=fd)))


async def follow(end: socket.socket) -> int:
    """Until the channel closes; the exit code."""
    channel = await Channel.over(end)
    rank = Rank()
    try:
        while True:
            command = await channel.receive()
            channel.send(await rank.reply(command))
    except ChannelClosed:
        return 0
    finally:
        rank.close()
        await channel.close()


class Rank:
    """What this process has become: nothing, a whole model, at last a part that takes steps."""

    _start: Start
    _loaded: Loaded
    _part: Part | None = None

    async def reply(self, command: Command) -> Reply:
        try:
            return await self._carry_out(command)
        except Exception as error:  # noqa: BLE001 - rank 0 is told, and decides what it means
            return failed(error)

    def close(self) -> None:
        if self._part is not None:
            self._part.close()

    async def _carry_out(self, command: Command) -> Done:
        match command:
            case Start():
                self._load(command)
                return Done()
            case Join(meeting):
                self._join(meeting)
                return Done()
        assert self._part is not None
        generations, running = await self._part.run(command)
        return done(generations, running, self._part.reports.taken())

    def _load(self, start: Start) -> None:
        spec = start.spec
        if spec.cpus:
            pin(cores_of(spec.cpus, spec.tensor_parallel, start.rank))
        from .part import load_whole  # imported after pinning

        self._start = start
        self._loaded = load_whole(spec)

    def _join(self, meeting: str) -> None:
        from .part import follower_part

        self._part = follower_part(self._start, self._loaded, meeting)


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # as the shard itself: to take the interpreter down with torch in it costs a second
