"""The command line: help is quick, bad input is one sentence and exit code 2, nobody there is 3."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from orchestrator.cli import app
from orchestrator.deployment.state import State, StateFolder, started_ticks
from orchestrator.errors import ConfigError
from tgi_patches.contract import OVERLAY_VERSION, PROTOCOL_VERSION, Role, ShardSpec

COMMANDS = ("up", "down", "status", "degrade", "serve", "shard", "logs", "verify", "version")


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ORCHESTRATOR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def sentence(result: Result) -> str:
    """The last line on stderr, after what told of progress; nothing on stdout."""
    assert result.stdout == ""
    *progress, last = result.stderr.splitlines()
    assert all(line.startswith("... ") for line in progress)
    return last


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_explains_every_command(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    assert "Usage:" in result.stdout
    if arguments == ["--help"]:
        assert all(name in result.stdout for name in (*COMMANDS, "config"))


def test_importing_the_command_line_brings_in_nothing_heavy() -> None:
    code = (
        "import sys, orchestrator.cli\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'redis', 'httpx', 'pydantic', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_an_unknown_command_or_option_is_bad_input() -> None:
    assert run("upp").exit_code == 2
    assert run("up", "--prefil", "2").exit_code == 2
    assert run("up", "--prefill", "two").exit_code == 2


# --- settings -----------------------------------------------------------------------------------


def test_config_show_tells_where_each_value_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("version: 1\ndeployment: blue\nlimits: {queue_size: 5}\n")
    monkeypatch.setenv("ORCHESTRATOR_LIMITS__QUEUE_SIZE", "7")
    result = run("config", "show", "--origin", "--config", str(file))
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    assert result.exit_code == 0
    assert rows["deployment"] == ['"blue"', "file", str(file)]
    assert rows["limits.queue_size"] == ["7", "env", "ORCHESTRATOR_LIMITS__QUEUE_SIZE"]
    assert rows["gateway.listen"] == ['"127.0.0.1:3000"', "default"]


def test_config_show_hides_passwords_and_speaks_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_REDIS__URL", "redis://user:hunter2@host:6379/0")
    result = run("config", "show", "--json")
    assert json.loads(result.stdout)["redis.url"] == {
        "value": "redis://user:***@host:6379/0",
        "origin": "env ORCHESTRATOR_REDIS__URL",
    }
    assert "hunter2" not in run("config", "show").stdout


def test_a_key_that_does_not_exist_names_the_nearest_one(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("version: 1\nmodel: {idd: x}\n")
    for command in (["up"], ["config", "show"], ["verify"]):
        result = run(*command, "--config", str(file))
        assert result.exit_code == 2
        assert "'model.idd'" in sentence(result)
        assert "'model.id'" in sentence(result)


def test_the_file_may_be_named_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("version: 1\ndeployment: green\n")
    monkeypatch.setenv("ORCHESTRATOR_CONFIG", str(file))
    assert "deployment" in run("config", "show").stdout
    assert '"green"' in run("config", "show").stdout


# --- up -----------------------------------------------------------------------------------------


def test_a_model_folder_that_is_missing_is_one_sentence(tmp_path: Path) -> None:
    result = run("up", "--port", "0", "--model", str(tmp_path / "nothing"))
    assert result.exit_code == 2
    assert sentence(result).endswith(f"The model folder {tmp_path}/nothing does not exist.")


def test_a_model_that_is_no_decoder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    result = run("up", "--port", "0", "--model", str(tmp_path))
    assert (result.exit_code, "BertForMaskedLM" in sentence(result)) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prefill", "0", "--decode", "0"], "at least one shard"),
        (["--dtype", "float64"], "model.dtype"),
        (["--port", "70000"], "gateway.listen"),
        (["--deployment", "../x"], "deployment"),
        (["--redis", "http://host"], "redis.url"),
    ],
)
def test_flags_that_cannot_be_used_are_one_sentence(arguments: list[str], said: str) -> None:
    result = run("up", *arguments)
    assert result.exit_code == 2
    assert said in sentence(result)


def test_a_port_in_use_is_one_sentence_and_found_before_the_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("up", "--port", str(port), "--model", "/nothing")
    assert result.exit_code == 2
    assert sentence(result) == f"The gateway cannot listen on 127.0.0.1:{port}: Address already in use."


def test_a_second_start_of_a_deployment_is_refused() -> None:
    folder = StateFolder.of("blue", os.environ)
    folder.create()
    with folder.locked():
        result = run("up", "--deployment", "blue", "--port", "0", "--model", "/nothing")
    assert result.exit_code == 2
    assert sentence(result).startswith("The deployment 'blue' already runs")


def test_debug_shows_where_an_error_of_ours_came_from(tmp_path: Path) -> None:
    result = run("--debug", "up", "--port", "0", "--model", str(tmp_path / "nothing"))
    assert isinstance(result.exception, ConfigError)


# --- a deployment that runs, or not -------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "down"])
def test_a_deployment_that_does_not_run_is_unreachable(command: str) -> None:
    result = run(command, "--deployment", "blue")
    assert result.exit_code == 3
    assert sentence(result) == "No deployment 'blue' runs here: start one with `tgi-orchestrator up`."


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_gateway_that_does_not_answer_is_unreachable() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for arguments in (["status", "--url", url], ["verify", "--url", url, "--reference", url]):
        result = run(*arguments)
        assert result.exit_code == 3, result.output
        assert url in result.stderr.splitlines()[-1]


def test_down_stops_the_process_of_the_state_file_and_no_other(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder = StateFolder.of("blue", os.environ)
    folder.create()
    spec = ShardSpec("blue", "prefill-0", Role.PREFILL, "/m", "tiny")
    ticks = started_ticks(child.pid) or 0
    state = State("blue", child.pid, ticks + 1, "http://x", "unix:///r", "tiny", "float32", "/a", (spec,))
    folder.write(state)
    killed = run("down", "--deployment", "blue")
    assert (killed.exit_code, sentence(killed)) == (
        0,
        "'blue' was not running: what it left behind is removed.",
    )
    assert run("down", "--deployment", "blue").exit_code == 3
    assert child.poll() is None
    folder.write(State.from_json(state.to_json().replace(str(ticks + 1), str(ticks))))
    result = run("down", "--deployment", "blue")
    assert (result.exit_code, child.wait()) == (0, -15)
    assert child.stdin is not None
    child.stdin.close()


@pytest.mark.parametrize(
    ("flag", "said"),
    [(["--dtype", "bfloat16"], "runs in float32"), (["--model", "other/model"], "runs org/tiny")],
)
def test_verify_refuses_flags_that_ask_for_another_deployment_than_the_running_one(
    flag: list[str], said: str
) -> None:
    folder = StateFolder.of("blue", os.environ)
    folder.create()
    spec = ShardSpec("blue", "prefill-0", Role.PREFILL, "/m", "org/tiny")
    ticks = started_ticks(os.getpid()) or 0
    url = f"http://127.0.0.1:{free_port()}"
    folder.write(State("blue", os.getpid(), ticks, url, "unix:///r", "org/tiny", "float32", "/a", (spec,)))
    result = run("verify", "--deployment", "blue", *flag)
    assert (result.exit_code, said in sentence(result)) == (2, True)
    assert run("verify", "-d", "blue", "--dtype", "float32", "--model", "org/tiny").exit_code == 3


def test_a_gateway_alone_needs_a_redis() -> None:
    result = run("serve")
    assert (result.exit_code, "--redis" in sentence(result)) == (2, True)


# --- logs and version ---------------------------------------------------------------------------


def test_logs_shows_the_last_lines_of_a_shard() -> None:
    folder = StateFolder.of("blue", os.environ)
    folder.create()
    folder.log_of("decode-0").write_text("".join(f"line {number}\n" for number in range(100)))
    result = run("logs", "decode-0", "--deployment", "blue", "-n", "2")
    assert (result.exit_code, result.stdout) == (0, "line 98\nline 99\n")
    result = run("logs", "decode-7", "--deployment", "blue")
    assert (result.exit_code, sentence(result)) == (
        2,
        "There is no log of 'decode-7': there are decode-0.",
    )


def test_logs_follow_shows_what_is_appended_and_a_log_that_begins_anew(tmp_path: Path) -> None:
    folder = StateFolder.of("blue", os.environ)
    folder.create()
    log = folder.log_of("decode-0")
    log.write_text("old\n")
    command = [sys.executable, "-m", "orchestrator.cli", "logs", "decode-0", "-d", "blue", "-f", "-n", "1"]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    try:
        assert reader.stdout.readline() == "old\n"
        with log.open("a") as writer:
            writer.write("fresh\n")
        assert reader.stdout.readline() == "fresh\n"
        log.write_text("new\n")
        assert reader.stdout.readline() == "new\n"
    finally:
        reader.kill()
        reader.communicate()


def test_version_names_the_program_and_the_contract() -> None:
    result = run("version")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1] == f"protocol {PROTOCOL_VERSION}, overlay {OVERLAY_VERSION}"


LONG, ALLOWED = "d" * 60, "must be 1 to 64 characters of A-Z a-z 0-9 _ . -"
SHARD = ("shard", "--role", "prefill", "--listen", "127.0.0.1:3001")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--role", "both"), "--role must be prefill, decode or mixed, not 'both'."),
        (("--listen", "3001"), "--listen must look like 10.0.0.1:3001, not '3001'."),
        (("--listen", "10.0.0.1:0"), "--listen must look like 10.0.0.1:3001, not '10.0.0.1:0'."),
        (("--cpus", "all"), "--cpus must look like 0,1, not 'all'."),
        (("--name", "a/b"), f"--name: The shard name 'a/b' {ALLOWED}"),
        (("--name", ""), f"--name: The shard name '' {ALLOWED}"),
        (("--name", "p.pulled"), "--name: A shard's name must not end in '.pulled'."),
        (
            ("--role", "decode", "--name", LONG),
            f"--name: The name of a shard that pulls, with its suffix, {LONG + '.pulled'!r} {ALLOWED}",
        ),
        (
            ("--key-file", "/nonexistent"),
            "The key file /nonexistent (--key-file) cannot be read: No such file or directory.",
        ),
        (
            ("--listen", "10.0.0.1:3001"),
            "10.0.0.1:3001 can be reached from other hosts: name the deployment's key with --key-file.",
        ),
        (
            ("--pull-listen", "0.0.0.0:3101"),
            "0.0.0.0:3101 can be reached from other hosts: name the deployment's key with --key-file.",
        ),
    ],
)
def test_a_shard_for_another_host_says_what_is_wrong_with_its_flags(
    flags: tuple[str, ...], told: str
) -> None:
    result = run(*SHARD, *flags)
    assert (result.exit_code, sentence(result)) == (2, told)
