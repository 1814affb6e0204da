"""TGI's server as a child process: its command and environment, its ends, and what it said last."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.embedded.tgi import leash
from orchestrator.embedded.tgi.process import (
    SOCKET_PATH_BYTES,
    command,
    environment,
    of_rank,
    private_folder,
    started,
)
from orchestrator.errors import ConfigError, ShardError
from tgi_patches.contract import EPOCH_VARIABLE, KEY_FILE_VARIABLE, KEY_VARIABLE, Role, ShardSpec

LIMIT_S = 20.0


def spec(python: str, **changes: Any) -> ShardSpec:
    values = {
        "deployment": "test",
        "shard": "decode-0",
        "role": Role.DECODE,
        "model": "/models/m",
        "model_name": "m",
        "tgi_python": python,
        "cpus": (0,),
    }
    return ShardSpec(**values | changes)


@pytest.fixture
def folder() -> Iterator[Path]:
    with private_folder() as path:
        yield path


# --- what is started ---


def test_the_command_is_the_launcher_s_with_the_overlay_in_front() -> None:
    made = command(
        spec("/tgi/python", dtype="bfloat16", max_input_tokens=99, max_total_tokens=100), Path("/u")
    )
    assert made == [
        *("/tgi/python", "-m", "tgi_patches.entrypoint.text_generation_server", "serve", "/models/m"),
        *("--uds-path", "/u", "--max-input-tokens", "99", "--dtype", "bfloat16"),
    ]


def test_several_ranks_are_told_what_the_launcher_would_tell_them() -> None:
    asked = spec("/tgi/python", tensor_parallel=2)
    assert command(asked, Path("/u"))[-1] == "--sharded"
    assert of_rank(asked, 1, 4711) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4711",
    }
    assert of_rank(spec("/tgi/python"), 0, 4711) == {}
    assert "--sharded" not in command(spec("/tgi/python"), Path("/u"))


async def test_ranks_live_and_end_together(tmp_path: Path, folder: Path) -> None:
    """One still loads and the other ends: nobody waits for the first one."""
    half = tmp_path / "python"
    half.write_text("#!/bin/sh\n[ $RANK = 0 ] && exec sleep 600\necho 'no device for me'\nexit 3\n")
    half.chmod(0o755)
    async with started(spec(str(half), tensor_parallel=2), dict(os.environ), folder) as server:
        pids = [rank.pid for rank in server.ranks]
        with pytest.raises(ShardError, match=r"exit code 3.: no device for me"):
            await server.listening(LIMIT_S)
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_float32_is_tgi_s_default_and_int8_is_not_known_there() -> None:
    assert "--dtype" not in command(spec("/tgi/python"), Path("/u"))
    with pytest.raises(ConfigError, match=r"runs in bfloat16, float16, float32, not in int8\."):
        command(spec("/tgi/python", dtype="int8"), Path("/u"))


def test_the_environment_has_tgi_s_defaults_the_spec_and_the_epoch(folder: Path) -> None:
    asked = spec("/tgi/python", prefix_caching=True, cpus=(0, 1))
    env = environment(asked, 77, folder, {"HOME": "/root", "ATTENTION": "paged"})
    assert env["ATTENTION"] == "flashdecoding-ipex"
    assert (env["PREFIX_CACHING"], env["HF_HUB_OFFLINE"], env["OMP_NUM_THREADS"]) == ("1", "1", "2")
    assert (env[EPOCH_VARIABLE], env["HOME"], env["PYTHONUNBUFFERED"]) == ("77", "/root", "1")
    assert ShardSpec.from_env(env) == asked


def test_no_server_gets_the_deployment_s_key(folder: Path) -> None:
    secrets = {KEY_VARIABLE: "k" * 16, KEY_FILE_VARIABLE: "/run/key"}
    env = environment(spec("/tgi/python"), 77, folder, {"HOME": "/root", **secrets})
    assert env["HOME"] == "/root"
    assert secrets.keys().isdisjoint(env)


def test_the_user_s_variables_have_the_last_word(folder: Path) -> None:
    asked = spec("/tgi/python", tgi_env={"ATTENTION": "flashinfer", "PYTHONPATH": "/mine"})
    env = environment(asked, 77, folder, {"PYTHONPATH": "/theirs"})
    assert env["ATTENTION"] == "flashinfer"
    assert env["PYTHONPATH"].split(os.pathsep)[1:] == ["/mine"]


def test_the_interpreter_sees_the_overlay_and_no_other_package_of_ours(folder: Path) -> None:
    env = environment(spec("/tgi/python"), 77, folder, {})
    (path,) = env["PYTHONPATH"].split(os.pathsep)
    assert [entry.name for entry in Path(path).iterdir()] == ["tgi_patches"]
    ask = "import tgi_patches.contract, importlib.util; print(importlib.util.find_spec('orchestrator'))"
    # -S: without the packages of this environment, which has the project installed
    said = subprocess.run(
        [sys.executable, "-S", "-c", ask], env=env, cwd="/", capture_output=True, text=True, timeout=60
    )
    assert said.stdout == "None\n", said.stderr


def test_the_socket_s_path_fits_into_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with private_folder() as short:
        assert len(os.fsencode(short / "tgi-0")) <= SOCKET_PATH_BYTES
        assert short.stat().st_mode & 0o077 == 0
    assert not short.exists()


# --- how it ends ---


async def test_it_listens_and_is_gone_after_the_block(fake_python: str, folder: Path) -> None:
    asked = spec(fake_python)
    env = environment(asked, 1, folder, os.environ)
    async with started(asked, env, folder) as process:
        await process.listening(LIMIT_S)
        assert psutil.pid_exists(process.ranks[0].pid)
        assert os.getpgid(process.ranks[0].pid) == process.ranks[0].pid  # a signal to our group is not for it
    assert not psutil.pid_exists(process.ranks[0].pid)


async def test_one_that_does_not_end_when_asked_is_forced(tmp_path: Path, folder: Path) -> None:
    stubborn = tmp_path / "python"
    stubborn.write_text("#!/bin/sh\ntrap '' TERM\ntouch \"$6-0\"\nwhile :; do sleep 0.05; done\n")
    stubborn.chmod(0o755)
    async with started(spec(str(stubborn)), os.environ, folder) as process:
        await process.listening(LIMIT_S)
        await process.ranks[0].stop(grace_s=0.2)
        with pytest.raises(ShardError, match=r"ended \(signal 9\)"):
            await process.while_running(asyncio.get_running_loop().create_future())


async def test_one_that_dies_at_its_start_tells_its_last_lines(fake_python: str, folder: Path) -> None:
    asked = spec(fake_python, tgi_env={"FAKE_TGI": '{"last_words": "line 1\\nOutOfMemory: 5 GB\\n"}'})
    env = environment(asked, 1, folder, os.environ)
    async with started(asked, env, folder) as process:
        with pytest.raises(
            ShardError, match=r"^TGI's server ended \(exit code 1\): line 1 \| OutOfMemory: 5 GB$"
        ):
            await process.listening(LIMIT_S)


async def test_one_that_refuses_its_input_is_a_mistake_of_the_user(tmp_path: Path, folder: Path) -> None:
    refusing = tmp_path / "python"
    refusing.write_text("#!/bin/sh\necho 'This TGI is not known.' >&2\nexit 2\n")
    refusing.chmod(0o755)
    async with started(spec(str(refusing)), os.environ, folder) as process:
        with pytest.raises(ConfigError, match=r"ended \(exit code 2\): This TGI is not known\."):
            await process.listening(LIMIT_S)


async def test_one_that_never_listens_is_given_up(tmp_path: Path, folder: Path) -> None:
    idle = tmp_path / "python"
    idle.write_text("#!/bin/sh\nexec sleep 60\n")
    idle.chmod(0o755)
    async with started(spec(str(idle)), os.environ, folder) as process:
        with pytest.raises(ShardError, match=r"did not listen within 0\.3 s"):
            await process.listening(0.3)


async def test_work_on_a_server_that_dies_fails_with_its_last_words(fake_python: str, folder: Path) -> None:
    asked = spec(fake_python)
    env = environment(asked, 1, folder, os.environ)
    async with started(asked, env, folder) as process:
        await process.listening(LIMIT_S)
        never = asyncio.get_running_loop().create_future()
        work = asyncio.create_task(process.while_running(never))
        os.kill(process.ranks[0].pid, signal.SIGKILL)
        with pytest.raises(ShardError, match=r"ended \(signal 9\)"):
            await work
        assert never.cancelled()


async def test_work_that_ends_before_the_server_gives_its_result(fake_python: str, folder: Path) -> None:
    async with started(spec(fake_python), os.environ, folder) as process:

        async def work() -> int:
            return 5

        assert await process.while_running(work()) == 5


def test_the_server_ends_with_its_starter_however_that_dies() -> None:
    server = ["/bin/sh", "-c", "echo $$; exec sleep 60"]
    starting = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, {leash.__file__!r}, str(os.getpid()), *{server!r}])\n"
        "time.sleep(60)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", starting], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    running = psutil.Process(int(starter.stdout.readline()))
    starter.kill()
    starter.wait()
    running.wait(timeout=LIMIT_S)
    starter.stdout.close()


def test_a_server_whose_starter_is_gone_is_not_started() -> None:
    done = subprocess.run(
        [sys.executable, leash.__file__, "1", "/bin/echo", "started"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "The shard that started this server is gone." in done.stderr
