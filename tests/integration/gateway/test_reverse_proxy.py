"""The nginx of docs/access.md, word for word, before a gateway: each event at once, names passed on."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.shards.script import Part

pytestmark = pytest.mark.skipif(
    not (shutil.which("nginx") and shutil.which("openssl")), reason="needs the commands nginx and openssl"
)

DOCS = Path(__file__).parents[3] / "docs"
PATIENCE_S = 20.0


@asynccontextmanager
async def proxied(folder: Path, gateway: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an nginx with the documented configuration; ports and files are those of this test."""
    port = _free_port()
    block = (DOCS / "access.md").read_text(encoding="utf-8").partition("```nginx\n")[2].partition("```")[0]
    for documented, ours in {
        "127.0.0.1:3000": gateway.removeprefix("http://"),
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/ssl/llm": str(folder / "llm"),
    }.items():
        assert documented in block
        block = block.replace(documented, ours)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    conf = folder / "nginx.conf"
    conf.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{ access_log off; {temporary}\n{block}}}\n"
    )
    await _certificate(folder)
    nginx = await asyncio.create_subprocess_exec("nginx", "-p", str(folder), "-c", str(conf))
    try:
        await _listens(nginx, port, folder)
        trust = ssl.create_default_context(cafile=str(folder / "llm.pem"))
        url = f"https://localhost:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False, verify=trust) as http:
            yield http
    finally:
        nginx.terminate()
        await asyncio.wait_for(nginx.wait(), PATIENCE_S)


async def _certificate(folder: Path) -> None:
    arguments = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost -days 2 -keyout llm.key -out llm.pem"
    )
    made = await asyncio.create_subprocess_exec(
        "openssl", *arguments.split(), cwd=folder, stderr=subprocess.DEVNULL
    )
    assert await made.wait() == 0


async def _listens(nginx: asyncio.subprocess.Process, port: int, folder: Path) -> None:
    for _ in range(500):
        assert nginx.returncode is None, (folder / "error.log").read_text()
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return
    raise AssertionError("nginx does not listen")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def test_each_event_passes_at_once_and_administration_does_not(house: Any, tmp_path: Path) -> None:
    house.decode.hold(Part.GET, 2)
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 5}}
    async with proxied(tmp_path, house.url) as http:
        headers = {"x-request-id": "mine-1"}
        async with http.stream("POST", "/generate_stream", json=body, headers=headers) as response:
            assert (response.status_code, response.headers["x-request-id"]) == (200, "mine-1")
            pieces = response.aiter_raw()
            seen = b""
            # The shard is held before its third token: the first two must come through all the same.
            while seen.count(b"data:") < 2:
                seen += await asyncio.wait_for(anext(pieces), PATIENCE_S)
            assert seen.count(b"data:") == 2
            house.decode.heal()
            async for piece in pieces:
                seen += piece
        assert seen.count(b"data:") == 5
        minted = (await http.post("/generate", json=body)).headers["x-request-id"]
        assert len(minted) == 32
        for path in ("/metrics", "/admin/status"):
            assert (await http.get(path)).status_code == 404
        assert (await http.get("/health")).status_code == 200
