"""The gRPC client against a fake server: what an error, a hung step and a dead server become."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from orchestrator.embedded.tgi.client import Connection
from orchestrator.errors import ConfigError, GenerationFailed, ShardError
from tests.integration.tgi.fake_server import FakeTgi
from tests.integration.tgi.protocol import schema


async def test_a_call_is_answered_with_the_server_s_own_message(connection: Connection) -> None:
    reply = await connection.call("Info", connection.message("InfoRequest")())
    assert (reply.dtype, reply.block_size, reply.support_chunking) == ("torch.float32", 64, True)


async def test_a_message_larger_than_grpc_s_default_arrives(tgi: FakeTgi, connection: Connection) -> None:
    more_than_4_mib = "x" * 5_000_000
    tgi.info = {"dtype": more_than_4_mib}
    assert (await connection.call("Info", connection.message("InfoRequest")())).dtype == more_than_4_mib
    large = connection.message("Request")(id=1, inputs=more_than_4_mib)
    large.stopping_parameters.max_new_tokens = 1
    batch = connection.message("Batch")(id=1, requests=[large])
    await connection.call("Prefill", connection.message("PrefillRequest")(batch=batch))
    assert tgi.requests("Prefill")[0].batch.requests[0].inputs == more_than_4_mib


async def test_a_refused_call_tells_the_server_s_reason_in_one_line(
    tgi: FakeTgi, connection: Connection
) -> None:
    tgi.fail_with = "not enough\n  memory"
    with pytest.raises(GenerationFailed, match=r"^not enough memory$"):
        await connection.call("Decode", connection.message("DecodeRequest")())


async def test_a_step_that_hangs_is_given_up_at_its_deadline(tgi: FakeTgi, connection: Connection) -> None:
    tgi.hang = asyncio.Event()
    with pytest.raises(ShardError, match=r"did not finish Prefill within 0\.1 s"):
        await connection.call("Prefill", connection.message("PrefillRequest")(), deadline_s=0.1)
    tgi.hang.set()


async def test_every_call_has_a_deadline_of_its_own(
    tgi: FakeTgi, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.embedded.tgi.client.DEADLINES_S", {"Decode": 0.1})
    tgi.hang = asyncio.Event()
    with pytest.raises(ShardError, match=r"did not finish Decode within 0\.1 s"):
        await connection.call("Decode", connection.message("DecodeRequest")())
    tgi.hang.set()


async def test_a_server_that_dies_within_a_call_is_gone(uds: Path) -> None:
    fake = FakeTgi(hang=asyncio.Event())
    server = await fake.serve(str(uds))
    connection = await Connection.open(uds, schema(), deadline_s=10)
    call = asyncio.ensure_future(connection.call("Decode", connection.message("DecodeRequest")()))
    await fake.called.wait()
    await server.stop(0)
    with pytest.raises(ShardError, match=r"TGI's server (went away|is stopping) \(Decode\)"):
        await call
    await connection.close()


async def test_a_socket_that_nobody_serves_is_an_error_at_the_deadline(uds: Path) -> None:
    with pytest.raises(ShardError, match=r"did not answer within 0\.2 s"):
        await Connection.open(uds, schema(), deadline_s=0.2)


async def test_a_server_of_another_protocol_is_refused(uds: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not have the service generate\.v3"):
        await Connection.open(uds, b"", deadline_s=10)
