"""The entrypoint with real processes: what the launcher gets, and how everything ends."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

import tgi_patches
from tests.integration.container.conftest import ENTRY, LIMIT_S, Container, until

OVERLAY = Path(tgi_patches.__path__[0]).parent
BIN = OVERLAY / "tgi_patches" / "entrypoint" / "bin"


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def test_a_prefill_container_from_start_to_stop(container: Container) -> None:
    odd = ("--model-id", "a b", "", "--", "$HOME *", "it's", '"', "\t", "--json-output")
    container.start("slow", odd[0], "--prefill-specialization", *odd[1:])
    launched, sidecar = container.launched(), container.sidecar()
    assert launched["argv"] == list(odd)
    env = launched["env"]
    assert env["PATH"] == f"{BIN}:{container.venv}/bin:{os.defpath}"
    assert launched["server"] == str(BIN / "text-generation-server")
    assert env["PYTHONPATH"] == str(OVERLAY)
    assert (env["PORT"], env["HOSTNAME"], env["CUDA_GRAPHS"]) == ("1", "127.0.0.1", "0")
    assert env["ORCHESTRATOR_SHARD_EPOCH"].isdecimal()
    assert (launched["group"], launched["blocked"]) == (launched["pid"], [])
    container.send(signal.SIGTERM)
    stopped = container.stopped()
    assert stopped["received"] == [signal.SIGTERM]
    assert stopped["sidecar"]  # it answers until the launcher has ended
    code, said = container.ended()
    assert code == 0
    assert '"event": "sidecar_ready"' in said  # its lines go through
    assert gone(sidecar)
    assert gone(launched["pid"])


def test_a_sidecar_that_crashes_is_started_again_and_the_launcher_runs_on(container: Container) -> None:
    container.start("run", "--prefill-specialization")
    launched, first = container.launched(), container.sidecar()
    os.kill(first, signal.SIGKILL)
    second = container.sidecar(other_than=first)
    assert psutil.pid_exists(launched["pid"])
    container.send(signal.SIGINT)
    code, said = container.ended()
    assert code == 0
    assert container.stopped()["received"] == [signal.SIGINT]
    assert said.count('"event": "sidecar_ready"') == 2
    assert gone(second)


@pytest.mark.parametrize(
    ("behaviour", "code"), [("exit 3", 3), (f"signal {signal.SIGSEGV:d}", -signal.SIGSEGV)]
)
def test_the_launcher_s_exit_code_or_signal_is_the_container_s(
    container: Container, behaviour: str, code: int
) -> None:
    container.start(behaviour, "--decode-specialization")
    assert container.ended()[0] == code


def test_what_a_crashed_launcher_leaves_is_ended_and_reaped(container: Container) -> None:
    """Its servers are in groups of their own and hold the GPU."""
    container.start("orphans", "--prefill-specialization")
    launched = container.launched()
    assert container.ended()[0] == -signal.SIGKILL
    assert len(launched["orphans"]) == 2
    assert all(gone(pid) for pid in launched["orphans"])


def test_nothing_is_left_of_an_entrypoint_that_was_killed(container: Container) -> None:
    container.start("run", "--prefill-specialization")
    launched, sidecar = container.launched(), container.sidecar()
    container.send(signal.SIGKILL)
    assert container.stopped()["received"] == [signal.SIGTERM]
    until(lambda: gone(launched["pid"]) and gone(sidecar), "the end of both")


def test_without_flag_and_spec_the_container_becomes_the_launcher(container: Container) -> None:
    container.start("run", "--model-id", "m", stock=True)
    launched = container.launched()
    assert launched["pid"] == container.pid
    assert launched["argv"] == ["--model-id", "m"]
    expected = container.env | {"STAND_IN": "run", "PATH": f"{container.venv}/bin:{os.defpath}"}
    assert {name: value for name, value in launched["env"].items() if name not in SHELL_S_OWN} == expected
    container.send(signal.SIGTERM)
    assert container.ended()[0] == 0


SHELL_S_OWN = ("PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE")
"""Of the stand-in's shell and interpreter."""


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (("--prefill-specialization", "--decode-specialization"), {}, "Give one of "),
        (("--prefill-specialization",), {"ATTENTION": "paged"}, "A prefill shard cannot use ATTENTION=paged"),
        (("--prefill-specialization",), {"VIRTUAL_ENV": "/nowhere"}, "There is no text-generation-launcher"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_exit_code_2(
    container: Container, arguments: tuple[str, ...], variables: dict[str, str], sentence: str
) -> None:
    container.start("run", *arguments, **variables)
    code, said = container.ended()
    assert (code, len(said.splitlines())) == (2, 1)
    assert said.startswith(sentence)


def test_a_sidecar_that_cannot_start_says_why_and_does_not_hurt_the_launcher(container: Container) -> None:
    (container.folder / "arenas").mkdir()
    (container.folder / "arenas").chmod(0o777)
    container.start("run", "--prefill-specialization")
    container.launched()
    assert container.process is not None
    assert container.process.stdout is not None
    while "is writable by everyone" not in (line := container.process.stdout.readline()):
        assert line, "the container ended"
    container.send(signal.SIGTERM)
    assert container.stopped()["received"] == [signal.SIGTERM]
    assert container.ended()[0] == 0


def test_the_command_is_a_module_of_the_wheel() -> None:
    done = subprocess.run([*ENTRY], env={"PATH": ""}, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_records_are_not_offered_to_the_network_without_a_key(container: Container) -> None:
    """Neither launcher nor sidecar starts."""
    container.spec["pull_listen"] = "0.0.0.0:0"
    container.start("run", "--prefill-specialization")
    code, said = container.ended()
    assert (code, len(said.splitlines())) == (2, 1)
    assert said.startswith("0.0.0.0:0 can be reached from other hosts: name the deployment's key in ")
    container.start("exit 0", "--prefill-specialization", ORCHESTRATOR_DEPLOYMENT_KEY="k" * 16)
    assert container.ended()[0] == 0
