"""The gateway's certificate: loaded at the start, and again while it runs."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import structlog

from orchestrator.access.keys import read_secret
from orchestrator.errors import ConfigError
from orchestrator.settings import GatewaySection

log = structlog.get_logger()


class ServerContext(ssl.SSLContext):
    """Knows the files that it was made from."""

    cert: Path
    key: Path


def context_of(gateway: GatewaySection) -> ssl.SSLContext | None:
    """As `server_context`; None where clients speak plain HTTP."""
    if gateway.tls_cert is None or gateway.tls_key is None:
        return None
    return server_context(gateway.tls_cert, gateway.tls_key)


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 or newer with a certificate chain and its private key, both PEM.  ConfigError."""
    context = ServerContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.cert, context.key = cert, key
    _load(context)
    return context


def reload(context: ssl.SSLContext) -> None:
    """New handshakes use what the files hold now; a pair that is of no use changes nothing and is logged."""
    assert isinstance(context, ServerContext)
    try:
        _load(context)
    except ConfigError as error:
        log.error("not_reloaded", what="certificate", error=str(error))
    else:
        log.info("certificate_read", file=str(context.cert))


def _load(context: ServerContext) -> None:
    """Into a context of no use first: one that fails is left with half a pair."""
    chain, key = _read_chain(context.cert), read_secret(context.key, "TLS key")
    if "PRIVATE KEY-----" not in key:
        raise ConfigError(f"The TLS key {context.key} holds no private key in PEM.")
    with _in_memory(chain) as chain_path, _in_memory(key) as key_path:
        for target in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
            asked: list[bool] = []

            def no_password(asked: list[bool] = asked) -> str:
                asked.append(True)
                return ""

            try:
                target.load_cert_chain(chain_path, key_path, no_password)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(_sentence(context, error, encrypted=bool(asked))) from None


def _sentence(context: ServerContext, error: OSError, *, encrypted: bool) -> str:
    if encrypted:
        return f"The TLS key {context.key} is encrypted: nobody is there to type its password."
    reason = getattr(error, "reason", None) or "unreadable"
    if reason == "KEY_VALUES_MISMATCH":
        return f"The TLS key {context.key} does not fit the certificate {context.cert}."
    return f"The certificate {context.cert} with the key {context.key} cannot be used: {reason}."


def _read_chain(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise ConfigError(f"The TLS certificate {path} cannot be read: {error.strerror}.") from None
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise ConfigError(f"The TLS certificate {path} holds no certificate in PEM.")
    return text


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """A path to `text`: what is tried and what is used are the same bytes, whatever becomes of the files."""
    descriptor = os.memfd_create("pem")
    try:
        with os.fdopen(descriptor, "w", closefd=False) as file:
            file.write(text)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
