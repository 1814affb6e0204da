"""The state folder: who runs, and what is left of those who do not."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.deployment.state import State, StateFolder, started_ticks, stop
from orchestrator.errors import ConfigError
from tgi_patches.contract import Role, ShardSpec

SPEC = ShardSpec("blue", "prefill-0", Role.PREFILL, "/m", "tiny", cpus=(1,))


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    folder = StateFolder.of("blue", {"XDG_STATE_HOME": str(tmp_path), "HOME": "/nowhere"})
    folder.create()
    return folder


def state_of(pid: int) -> State:
    return State(
        deployment="blue",
        pid=pid,
        pid_started=started_ticks(pid) or 0,
        url="http://127.0.0.1:3000",
        redis_url="unix:///r.sock",
        model_name="tiny",
        dtype="float32",
        arena_dir="/dev/shm/x",
        specs=(SPEC,),
        logs={"prefill-0": "/l/prefill-0.log"},
    )


def test_the_folder_follows_xdg_state_home_and_is_for_its_owner_only(
    folder: StateFolder, tmp_path: Path
) -> None:
    assert folder.path == tmp_path / "tgi-orchestrator" / "blue"
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert StateFolder.of("b", {"HOME": "/h"}).path == Path("/h/.local/state/tgi-orchestrator/b")


def test_a_name_that_would_leave_the_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="deployment name"):
        StateFolder.of("../other", {"HOME": "/h"})


def test_what_was_written_is_read_again_and_only_by_us(folder: StateFolder) -> None:
    state = state_of(os.getpid())
    folder.write(state)
    assert folder.read() == state
    assert folder.running() == state
    assert {path.stat().st_mode & 0o777 for path in folder.path.glob("state*")} == {0o600}


def test_a_state_whose_process_is_gone_or_recycled_does_not_run(folder: StateFolder) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder.write(state_of(child.pid))
    assert folder.running() is not None
    child.communicate()
    assert folder.running() is None
    folder.write(dataclasses.replace(state_of(os.getpid()), pid_started=1))
    assert folder.read() is not None
    assert folder.running() is None


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}', "[]", '{"specs": [{}]}'])
def test_a_damaged_state_file_counts_as_none(folder: StateFolder, text: str) -> None:
    (folder.path / "state.json").write_text(text)
    assert folder.read() is None


def test_a_second_start_is_refused_in_a_sentence_that_names_the_first(folder: StateFolder) -> None:
    folder.write(state_of(os.getpid()))
    said = rf"'blue' already runs at http://127.0.0.1:3000 \(process {os.getpid()}\)"
    with folder.locked(), pytest.raises(ConfigError, match=said), folder.locked():
        pass
    with folder.locked():
        pass


def test_forgetting_keeps_the_logs(folder: StateFolder) -> None:
    folder.write(state_of(os.getpid()))
    folder.log_of("prefill-0").write_text("a line\n")
    folder.forget()
    folder.forget()
    assert folder.read() is None
    assert folder.log_of("prefill-0").read_text() == "a line\n"


def child_with(handler: str) -> subprocess.Popen[bytes]:
    """A process that is ready and treats SIGTERM with `handler`."""
    code = f"import signal, sys; signal.signal(15, {handler}); print('up', flush=True); signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    return child


def test_stopping_sends_sigterm_and_waits_for_the_end() -> None:
    child = child_with("lambda *_: sys.exit(7)")
    assert stop(state_of(child.pid), timeout_s=30)
    child.communicate()
    assert child.returncode == 7


def test_stopping_tells_when_the_process_does_not_end() -> None:
    child = child_with("signal.SIG_IGN")
    assert not stop(state_of(child.pid), timeout_s=0.2)
    child.send_signal(signal.SIGKILL)
    child.communicate()
