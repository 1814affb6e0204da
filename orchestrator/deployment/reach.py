"""How a command of this machine reaches a gateway: TLS, the admin's address and token, a client's key.

Of a deployment that runs here we know the certificate: exactly that one is trusted, whatever name it
carries, since `https://127.0.0.1` is rarely among them.  Any other gateway must show a certificate that
this machine trusts for its name; OpenSSL's `SSL_CERT_FILE` adds one.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from orchestrator.config import API_KEYS_VARIABLE
from orchestrator.deployment.state import APPLICATION, State, StateFolder
from orchestrator.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a gateway is, and what it asks for."""

    url: str
    admin_url: str
    tls_cert: str = ""
    """The certificate to trust; empty: those that this machine trusts."""
    admin_token_file: str = ""

    @classmethod
    def of(cls, state: State) -> Reach:
        return cls(state.url, state.admin_url or state.url, state.tls_cert, state.admin_token_file)

    @classmethod
    def at(cls, url: str, env: Mapping[str, str]) -> Reach:
        """Of a gateway of which only the URL is known; that of a deployment here is known better."""
        for state in _running_here(env):
            if url in (state.url, state.admin_url):
                return cls.of(state)
        return cls(url, url)

    def trust(self) -> ssl.SSLContext:
        """ConfigError for a certificate file that has gone."""
        if not self.tls_cert:
            return ssl.create_default_context()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        # Also a certificate that is signed by an authority is trusted as it is.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(self.tls_cert)
        except OSError as error:
            raise ConfigError(f"The certificate {self.tls_cert} cannot be read: {error.strerror}.") from None
        return context

    def client(self, timeout: httpx.Timeout | float, api_key: str = "") -> httpx.AsyncClient:
        """For what clients ask."""
        return httpx.AsyncClient(**self._options(self.url, timeout, _bearer(api_key)))

    def admin(self, timeout: httpx.Timeout | float) -> httpx.AsyncClient:
        """For `/admin` and `/metrics`."""
        return httpx.AsyncClient(**self._options(self.admin_url, timeout, self.admin_headers()))

    def blocking(self, timeout_s: float, api_key: str = "") -> httpx.Client:
        """As `client`, for code that waits."""
        return httpx.Client(**self._options(self.url, timeout_s, _bearer(api_key)))

    def blocking_admin(self, timeout_s: float) -> httpx.Client:
        """As `admin`, for code that waits."""
        return httpx.Client(**self._options(self.admin_url, timeout_s, self.admin_headers()))

    def admin_headers(self) -> dict[str, str]:
        return _bearer(_token_in(self.admin_token_file) if self.admin_token_file else "")

    def _options(
        self, url: str, timeout: httpx.Timeout | float, headers: Mapping[str, str]
    ) -> dict[str, Any]:
        # Reading the machine's certificates takes 20 ms, which plain HTTP shall not pay.
        verify = self.trust() if url.startswith("https:") else False
        return {
            "base_url": url,
            "timeout": timeout,
            "trust_env": False,
            "verify": verify,
            "headers": headers,
        }


def client_key(keys_file: Path | None, env: Mapping[str, str]) -> str:
    """An API key to ask with: the first of the variable, else the first that stands whole in the file.

    Empty where there is none.
    """
    first = env.get(API_KEYS_VARIABLE, "").split(",")[0]
    if first:
        return first.partition("=")[2].strip()
    if keys_file is None:
        return ""
    try:
        named = yaml.safe_load(keys_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return ""  # whoever serves with this file says what is wrong with it
    listed = named.get("keys") if isinstance(named, dict) else None
    entries = listed.values() if isinstance(listed, dict) else ()
    whole = (entry.get("key") if isinstance(entry, dict) else entry for entry in entries)
    return next((key for key in whole if isinstance(key, str)), "")


def _running_here(env: Mapping[str, str]) -> Iterator[State]:
    base = StateFolder.of("default", env).path.parent
    assert base.name == APPLICATION
    for path in base.glob("*/state.json"):
        if (state := StateFolder(path.parent).running()) is not None:
            yield state


def _token_in(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"The admin token file {file} cannot be read: {error.strerror}.") from None


def _bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"} if secret else {}
