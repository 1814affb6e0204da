"""A sidecar process: `python -m tgi_patches.sidecar`, configured by its shard's spec in the environment."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys

from tgi_patches.bridge import ArenaError
from tgi_patches.contract import ContractError, ShardSpec
from tgi_patches.sidecar.serve import Order, serve

_BACKLOG = 128
_BAD_INPUT = 2
_FAILED = 1


def main() -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        order = Order.from_env(os.environ)
        asyncio.run(serve(order, listen(order.spec)))
    except (ContractError, ArenaError) as error:
        return _refused(str(error), _BAD_INPUT)
    except OSError as error:
        return _refused(f"The sidecar cannot go on: {error}.", _FAILED)
    except ExceptionGroup as group:
        return _refused(f"The sidecar cannot go on: {group.exceptions[0]!r}.", _FAILED)
    return 0


def listen(spec: ShardSpec) -> socket.socket:
    """Raises ContractError where the address cannot be listened on."""
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    # the protocol is named because asyncio sets TCP_NODELAY only where it is
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((spec.host, spec.sidecar_port))
        listener.listen(_BACKLOG)  # from the first beat on, nobody who asks is turned away
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ContractError(
            f"The sidecar of {spec.shard} cannot listen on {spec.host}:{spec.sidecar_port}: {reason}."
        ) from None
    return listener


def _refused(sentence: str, code: int) -> int:
    sys.stderr.write(f"{sentence}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
