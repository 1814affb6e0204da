"""The gateway's addresses: sockets that are ours before anything starts, and their URLs."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.settings import GatewaySection, host_and_port

BACKLOG = 1024
PROBE_S = 0.5


@dataclass(frozen=True, slots=True)
class Sockets:
    """Where a gateway is reached; its processes make them listen, so that nobody waits for none."""

    clients: socket.socket
    admin: socket.socket | None = None
    """For `/admin` and `/metrics`, where they have an address of their own."""

    @classmethod
    def bound(cls, gateway: GatewaySection, fd: int | None = None) -> Sockets:
        """ConfigError for an address that is taken.  `fd`: a bound socket for clients, from our parent."""
        clients = bound_socket(gateway.host, gateway.port) if fd is None else socket.socket(fileno=fd)
        if not gateway.admin_listen:
            return cls(clients)
        try:
            return cls(clients, bound_socket(*host_and_port(gateway.admin_listen)))
        except ConfigError:
            clients.close()
            raise

    @classmethod
    def of(cls, fd: int, admin_fd: int | None) -> Sockets:
        """Those that a parent handed down."""
        admin = None if admin_fd is None else socket.socket(fileno=admin_fd)
        return cls(socket.socket(fileno=fd), admin)

    def all(self) -> tuple[socket.socket, ...]:
        return (self.clients,) if self.admin is None else (self.clients, self.admin)

    def descriptors(self) -> tuple[int, ...]:
        return tuple(one.fileno() for one in self.all())

    def listen(self) -> None:
        for one in self.all():
            listen(one)

    def close(self) -> None:
        for one in self.all():
            one.close()


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address; ConfigError when somebody listens there already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Every connection inherits it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(_cannot_listen(host, port, error)) from None
    return listener


def listen(listener: socket.socket) -> None:
    """ConfigError when another process was bound to the same port and was quicker."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise ConfigError(_cannot_listen(host, port, error)) from None


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    return f"The gateway cannot listen on {host}:{port}: {error.strerror}."


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """The URL under which a client of this machine reaches it."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def listened_at(host: str, port: int) -> bool:
    """Whether somebody takes connections there, as this machine reaches it.  Blocks for a moment."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(PROBE_S)
        return probe.connect_ex((host, port)) == 0


def last_words(log_file: Path) -> str:
    """The sentence with which a process refused to start: the last line of its log that is no event."""
    lines = log_file.read_text(errors="replace").strip().splitlines()
    sentences = [line for line in lines if not line.startswith("{")]
    if not lines:
        return f"A process ended without a word; its log is {log_file}."
    return (sentences or lines)[-1]
