"""How commands reach the gateway of this machine: its own certificate, its token, a client's key."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from orchestrator.access.tls import server_context
from orchestrator.config import load_settings
from orchestrator.deployment.key import minted_admin_token
from orchestrator.deployment.reach import Reach, client_key
from orchestrator.deployment.state import State, StateFolder, started_ticks
from orchestrator.errors import ConfigError
from orchestrator.settings import GatewaySection
from tgi_patches.contract import Role, ShardSpec


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two certificates that nobody signed, for names that are not this machine's."""
    folder = tmp_path_factory.mktemp("pairs")
    for name in ("one", "two"):
        words = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name}"
        files = ("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem"))
        subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
        (folder / f"{name}.key").chmod(0o600)
    return folder


@asynccontextmanager
async def speaking(context: ssl.SSLContext) -> AsyncIterator[str]:
    """A TLS server that answers every request with the `authorization` that it was shown."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        shown = next((line for line in head.splitlines() if line.startswith("authorization")), "nothing")
        body = shown.encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_exactly_the_given_certificate_is_trusted_whatever_its_name(pairs: Path) -> None:
    async with speaking(server_context(pairs / "one.pem", pairs / "one.key")) as url:
        async with Reach(url, url, str(pairs / "one.pem")).client(5.0, "a-client's-key") as client:
            assert (await client.get("/")).text == "authorization: Bearer a-client's-key"
        for other in (str(pairs / "two.pem"), ""):
            async with Reach(url, url, other).client(5.0) as client:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await client.get("/")


async def test_the_administration_is_asked_at_its_own_address_with_its_token(
    pairs: Path, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-the-admin\n")
    async with speaking(server_context(pairs / "one.pem", pairs / "one.key")) as url:
        reach = Reach("https://127.0.0.1:1", url, str(pairs / "one.pem"), str(token))
        async with reach.admin(5.0) as client:
            assert (await client.get("/metrics")).text == "authorization: Bearer a-token-of-the-admin"


def test_a_url_of_a_deployment_that_runs_here_is_reached_as_that_one(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    folder = StateFolder.of("blue", env)
    folder.create()
    spec = ShardSpec("blue", "prefill-0", Role.PREFILL, "/m", "tiny")
    pid, ticks = os.getpid(), started_ticks(os.getpid()) or 0
    state = State("blue", pid, ticks, "https://127.0.0.1:7", "r", "m", "float32", "/a", (spec,))
    folder.write(state)
    assert Reach.at("https://127.0.0.1:7", env) == Reach.of(state)
    assert Reach.at("https://else:7", env) == Reach("https://else:7", "https://else:7")


def test_files_that_have_gone_are_named(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"^The certificate .*gone cannot be read: No such file"):
        Reach("https://x", "https://x", gone).trust()
    with pytest.raises(ConfigError, match=r"^The admin token file .*gone cannot be read: No such file"):
        Reach("http://x", "http://x", "", gone).admin(1.0)


def test_a_key_to_ask_with_comes_from_the_variable_or_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: {hashed: {key_sha256: aa}, anna: {key: the-key-of-anna}, bob: the-key-of-bob}\n")
    assert client_key(file, {}) == "the-key-of-anna"
    assert client_key(file, {"ORCHESTRATOR_API_KEYS": "x=the-key-of-x,y=other"}) == "the-key-of-x"
    assert client_key(None, {}) == client_key(tmp_path / "gone", {}) == ""
    file.write_text("- keys\n")
    assert client_key(file, {}) == ""


@pytest.mark.parametrize(
    ("gateway", "token"),
    [
        ({"listen": "127.0.0.1:1"}, None),
        ({"listen": "127.0.0.1:1", "admin_token_file": "/given"}, "/given"),
        ({"listen": "0.0.0.0:1"}, "minted"),
        ({"listen": "0.0.0.0:1", "admin_listen": "127.0.0.1:2"}, None),
        ({"listen": "127.0.0.1:1", "admin_listen": "0.0.0.0:2"}, "minted"),
        ({"listen": "0.0.0.0:1", "admin_token_file": "/given"}, "/given"),
    ],
)
def test_a_gateway_that_others_reach_has_an_admin_token(
    tmp_path: Path, gateway: dict[str, str], token: str | None
) -> None:
    folder = StateFolder(tmp_path)
    named = {f"gateway.{name}": value for name, value in gateway.items()}
    section: GatewaySection = load_settings(None, named, {}).settings.gateway
    minted = minted_admin_token(section, folder, {"ORCHESTRATOR_API_KEYS": "x=the-key-of-x-is-long"})
    own = tmp_path / "admin-token"
    assert minted == {"minted": own, None: None}.get(token, Path(token or "/"))
    assert own.exists() == (token == "minted")
    if token == "minted":
        assert (len(own.read_text().strip()), own.stat().st_mode & 0o777) == (64, 0o600)
        assert minted_admin_token(section, folder, {}) is None
