"""One user's HTTP connection: streams line by line as the bytes come.

Locust's own clients fill a block before they hand it on, which would falsify TTFT.
"""

from __future__ import annotations

import json
import ssl
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPConnectionClosed, HTTPParseError, HTTPSocketPoolResponse

from .answers import read_error
from .checks import LoadError, api_key

UNREACHED = (OSError, HTTPParseError)
"""What a connection raises that cannot be made, breaks off or stays silent."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and with what."""

    host: str
    connect_timeout_s: float
    idle_timeout_s: float
    ca_file: str = ""
    insecure: bool = False
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, host: str, options: Namespace) -> Target:
        """Raises LoadError."""
        parts = urlsplit(host)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise LoadError(f"--host {host!r} is no URL such as http://127.0.0.1:8080.")
        key = api_key(options)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        times = (options.connect_timeout_s, options.idle_timeout_s)
        return cls(host.rstrip("/"), *times, options.ca_file, options.insecure, headers)


def unverified(**_: Any) -> ssl.SSLContext:
    """Encrypted, to whomever answers."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Client:
    """Requests one after the other over one connection."""

    def __init__(self, target: Target) -> None:
        self._host = target.host
        self._prefix = urlsplit(target.host).path
        self._headers = {**target.headers, "content-type": "application/json"}
        self._reused = False
        try:
            self._http = HTTPClient.from_url(
                target.host,
                connection_timeout=target.connect_timeout_s,
                network_timeout=target.idle_timeout_s,
                insecure=target.insecure,
                ssl_options={"ca_certs": target.ca_file} if target.ca_file else {},
                ssl_context_factory=unverified if target.insecure else None,
            )
        except OSError as error:
            raise LoadError(f"--ca-file {target.ca_file} cannot be used: {error}.") from error

    def ask(self, path: str, body: Any = None) -> Any:
        """The JSON of a whole answer.  Raises one of UNREACHED, ValueError, and LoadError for any but 200."""
        method = "GET" if body is None else "POST"
        answer = self._http.request(method, self._prefix + path, _encoded(body), self._headers)
        try:
            whole = answer.read()
        finally:
            answer.release()
        if answer.status_code != 200:
            fault = read_error(answer.status_code, whole)
            raise LoadError(
                f"{self._host} answers {path} with HTTP {fault.status}: {fault.text or 'no text'}"
            )
        return json.loads(whole)

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> HTTPSocketPoolResponse:
        """The head of the answer; `lines` reads the rest.  Raises one of UNREACHED.

        Once more when a connection that had been used was closed before it brought a single byte:
        the server may close an idle one at any time.
        """
        arguments = ("POST", self._prefix + path, body, {**self._headers, **headers})
        reused, self._reused = self._reused, False
        try:
            return self._http.request(*arguments)
        except HTTPConnectionClosed:
            if not reused:
                raise
            return self._http.request(*arguments)

    def lines(self, answer: HTTPSocketPoolResponse) -> Iterator[bytes]:
        """The body as it comes, a line at a time.  Raises one of UNREACHED when it is cut off."""
        try:
            while line := answer.readline(b"\n"):
                yield line
            if rest := answer.read():
                yield rest
            self._reused = True
        finally:
            answer.release()

    def close(self) -> None:
        self._http.close()


def _encoded(body: Any) -> bytes:
    return b"" if body is None else json.dumps(body).encode()
