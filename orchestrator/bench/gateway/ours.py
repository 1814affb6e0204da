"""Our gateway as a subject: `python -m orchestrator.bench.gateway.ours --help`.

Application, server and its configuration are those of a worker of `serve`.  Without `--redis` the queue is
the one in memory, with the mock shards in its table; with it the real queue, and somebody else conducts.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import signal
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import uvloop

from orchestrator.admission import GatewaySettings
from orchestrator.api.app import create_app
from orchestrator.bench.gateway.shards import DEPLOYMENT, LIMITS, view_of
from orchestrator.commands.accepting import Turns, WorkerServer
from orchestrator.commands.worker import config_of, spare_the_collector
from orchestrator.deployment.gateway import bound_socket
from orchestrator.deployment.logging import log_json_to
from orchestrator.queues import GatewayQueue
from orchestrator.queues.fake import FakeQueue
from orchestrator.queues.protocol import RequestQueue
from orchestrator.shards.client import ShardClient
from tgi_patches.contract import Role

BACKLOG = 4096
MOST_OPEN = 8192


@dataclass(frozen=True, slots=True)
class Options:
    port: int
    prefill_port: int
    decode_port: int
    redis_url: str = ""
    profile: Path | None = None


def parsed(arguments: list[str]) -> Options:
    """Exits with code 2 for what is no option."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m orchestrator.bench.gateway.ours")
    parser.add_argument("--port", type=int, required=True, help="where the gateway listens, on loopback")
    parser.add_argument("--prefill-port", type=int, required=True, help="of the mock prefill shard")
    parser.add_argument("--decode-port", type=int, required=True, help="of the mock decode shard")
    parser.add_argument("--redis", default="", help="Redis URL; without it the queue is in memory")
    parser.add_argument("--profile", type=Path, help="write cProfile's figures there at SIGTERM")
    given = parser.parse_args(arguments)
    return Options(given.port, given.prefill_port, given.decode_port, given.redis, given.profile)


def queue_of(options: Options) -> RequestQueue:
    if options.redis_url:
        return GatewayQueue(options.redis_url, DEPLOYMENT, "gateway-bench", queue_size=MOST_OPEN)
    views = [view_of(Role.PREFILL, options.prefill_port), view_of(Role.DECODE, options.decode_port)]
    return FakeQueue(views, queue_size=MOST_OPEN)


async def serve(options: Options) -> None:
    """Until SIGTERM or SIGINT."""
    settings = GatewaySettings(limits=LIMITS, max_open_requests=MOST_OPEN)
    app = create_app(settings, queue=queue_of(options), shards=ShardClient())
    with closing(bound_socket("127.0.0.1", options.port)) as listener:
        listener.listen(BACKLOG)
        spare_the_collector()
        server = WorkerServer(config_of(app, None), (listener,), Turns(None, 0))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.interrupt)
        await server.serve()


def main(arguments: list[str]) -> None:
    options = parsed(arguments)
    log_json_to(sys.stderr)
    profile = cProfile.Profile() if options.profile else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if profile:
            profile.enable()
        try:
            runner.run(serve(options))
        finally:
            if profile and options.profile:
                profile.disable()
                profile.dump_stats(options.profile)


if __name__ == "__main__":
    main(sys.argv[1:])
