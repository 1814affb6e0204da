"""The followers as rank 0 sees them: processes that are started, asked, watched and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import structlog

from orchestrator.errors import ConfigError, ShardError
from tgi_patches.contract import KEY_FILE_VARIABLE, KEY_VARIABLE, PARENT_VARIABLE, ShardSpec

from .channel import Channel, ChannelClosed
from .messages import Command, Failed, Reply, Start
from .verdict import told

log = structlog.get_logger(__name__)

FOLLOWER = "orchestrator.embedded.shard.ranks.follower"
STOP_GRACE_S = 1.0
"""Less than a launcher gives the shard itself."""
KILLED_S = 2.0
LAST_WORDS_S = 2.0
"""From the end of a channel to that of its process."""
_SECRETS = {KEY_VARIABLE, KEY_FILE_VARIABLE}


class Process(Protocol):
    """What is needed of asyncio.subprocess.Process."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


Launch = Callable[[socket.socket], Awaitable[Process]]
"""Starts a follower on its end of the channel, which the caller closes."""


class Follower:
    """One of them."""

    def __init__(self, rank: int, process: Process, channel: Channel) -> None:
        self.rank = rank
        self.channel = channel
        self.process = process
        self.exit = asyncio.create_task(process.wait())

    async def reply(self) -> Reply:
        """To the oldest command that has none yet.  Raises ShardError where the process is gone."""
        try:
            reply: Reply = await self.channel.receive()
        except ChannelClosed:
            await asyncio.wait([self.exit], timeout=LAST_WORDS_S)
            raise self.lost() from None
        return reply

    def lost(self) -> ShardError:
        """Why it answers no more, in a sentence."""
        if not self.exit.done():
            return ShardError(f"Rank {self.rank} of this shard closed its channel.")
        code = self.exit.result()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ShardError(f"Rank {self.rank} of this shard ended ({how}).")

    async def stop(self) -> None:
        """It ends when its channel does; it is killed where it is busy."""
        await self.channel.close()
        await asyncio.wait([self.exit], timeout=STOP_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await asyncio.wait([self.exit], timeout=KILLED_S)


class Followers:
    """All ranks but this one."""

    def __init__(self, members: Sequence[Follower]) -> None:
        self._members = members

    def send(self, command: Command) -> None:
        for member in self._members:
            member.channel.send(command)

    def answering(self) -> list[asyncio.Task[Reply]]:
        """A task per follower, by rank; see Follower.reply.  Whoever asks cancels what is left of them."""
        return [asyncio.create_task(member.reply()) for member in self._members]

    async def replies(self, deadline_s: float) -> list[Reply]:
        """One of each, by rank.  Raises ShardError for one that is gone, or does not answer in time."""
        answering = self.answering()
        try:
            async with asyncio.timeout(deadline_s):
                return list(await asyncio.gather(*answering))
        except TimeoutError:
            raise ShardError(f"The ranks of this shard were not ready within {deadline_s:g} s.") from None
        finally:
            await cancelled(answering)

    def check(self, replies: Sequence[Reply]) -> None:
        """Raises for the first that failed: ConfigError with its own sentence, else ShardError."""
        for member, reply in zip(self._members, replies, strict=True):
            if isinstance(reply, Failed) and reply.kind == ConfigError.__name__:
                raise ConfigError(reply.text)
            if isinstance(reply, Failed):
                raise ShardError(f"Rank {member.rank} of this shard failed: {told(reply)}")

    async def ended(self) -> ShardError:
        """Returns once a follower is gone, which none should be while the shard runs."""
        await asyncio.wait([m.exit for m in self._members], return_when=asyncio.FIRST_COMPLETED)
        return next(member.lost() for member in self._members if member.exit.done())

    async def stop(self) -> None:
        async with asyncio.TaskGroup() as group:
            for member in self._members:
                group.create_task(member.stop())


async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def started(spec: ShardSpec, epoch: int, threads: int, launch: Launch) -> AsyncIterator[Followers]:
    """Ranks 1 and up, loading; gone after the block."""
    members: list[Follower] = []
    followers = Followers(members)
    try:
        for rank in range(1, spec.tensor_parallel):
            ours, theirs = socket.socketpair()
            with theirs:
                process = await launch(theirs)
            member = Follower(rank, process, await Channel.over(ours))
            members.append(member)
            member.channel.send(Start(spec, rank, epoch, threads))
            log.info("rank_started", shard=spec.shard, rank=rank, pid=process.pid)
        yield followers
    finally:
        await followers.stop()


async def launched(end: socket.socket) -> asyncio.subprocess.Process:
    """A process that ends with this one: it asks the kernel for that, and its channel closes."""
    env = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        FOLLOWER,
        str(end.fileno()),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(end.fileno(),),
        env=env | {PARENT_VARIABLE: str(os.getpid())},
    )
