"""When a sidecar is started, replaced and started again: real processes and files, a clock of the test."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tgi_patches.entrypoint import processes
from tgi_patches.entrypoint.supervise import Command, Patience, SidecarKeeper

PATIENCE = Patience(
    look_every_s=0.5, start_s=30.0, beat_s=10.0, pause_s=0.5, longest_pause_s=3.0, settled_s=60.0
)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Kept(SidecarKeeper):
    """A keeper of a process that sleeps; the test beats for it."""

    def __init__(self, beat_path: Path) -> None:
        self.clock = Clock()
        self.path = beat_path
        self.pids: list[int] = []
        self.beats = 0
        super().__init__(Command(("sleep", "600"), {"PATH": os.defpath}), beat_path, PATIENCE, self.clock)

    def after(self, seconds: float, *, steps: int = 1, beating: bool = False) -> None:
        """That much time has passed; it was looked at `steps` times meanwhile."""
        for _ in range(steps):
            self.clock.now_s += seconds / steps
            if beating:
                self.beat()
            self.look()
            if self.pid and self.pid not in self.pids:
                self.pids.append(self.pid)

    def beat(self) -> None:
        self.beats += 1
        self.path.touch()
        os.utime(self.path, ns=(self.beats, self.beats))

    def killed(self) -> bool:
        """The present one was; its end has been told to the keeper."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return False
        self.ended(status)
        return os.WTERMSIG(status) == signal.SIGKILL

    def crash(self) -> None:
        os.kill(self.pid, signal.SIGTERM)
        self.ended(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path / "p0.sidecar")
    made.after(0.0)
    yield made
    if made.pid:
        os.kill(made.pid, signal.SIGKILL)
        os.waitpid(made.pid, 0)


Blamed = Callable[[], bool]


@pytest.fixture
def blamed(capsys: pytest.CaptureFixture[str]) -> Blamed:
    """Whether one was found to hang, since this was asked last."""
    return lambda: "sidecar_hangs" in capsys.readouterr().err


def wait_killed(keeper: Kept) -> None:
    """The kernel needs a moment."""
    os.waitid(os.P_PID, keeper.pid, os.WEXITED | os.WNOWAIT)
    assert keeper.killed()


def test_it_is_started_at_the_first_look(keeper: Kept) -> None:
    assert len(keeper.pids) == 1
    # The child leads its group as soon as it runs, which may be after the fork has returned here.
    end_s = time.monotonic() + 30
    while os.getpgid(keeper.pid) != keeper.pid:
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_one_that_beats_is_left_alone(keeper: Kept, blamed: Blamed) -> None:
    keeper.after(100.0, steps=100, beating=True)
    assert not blamed()


def test_one_whose_beats_stop_is_killed_and_replaced(keeper: Kept, blamed: Blamed) -> None:
    keeper.after(5.0, steps=5, beating=True)
    keeper.after(9.5, steps=19)
    assert not blamed()
    keeper.after(0.5)
    wait_killed(keeper)
    keeper.after(0.5)
    assert len(keeper.pids) == 2


def test_the_first_beat_may_take_longer(keeper: Kept, blamed: Blamed) -> None:
    keeper.after(29.5, steps=59)
    assert not blamed()
    keeper.after(0.5)
    wait_killed(keeper)


def test_the_file_of_an_earlier_sidecar_is_no_beat(keeper: Kept, blamed: Blamed) -> None:
    keeper.beat()
    keeper.after(1.0, steps=2)
    keeper.crash()
    keeper.after(0.5)
    assert len(keeper.pids) == 2
    keeper.after(15.0, steps=30)
    assert not blamed()  # it has `start_s`, not `beat_s`
    keeper.after(15.0, steps=30)
    wait_killed(keeper)


def test_who_was_held_up_himself_blames_nobody(keeper: Kept, blamed: Blamed) -> None:
    """The whole container was paused."""
    keeper.after(5.0, steps=5, beating=True)
    keeper.after(3600.0)
    assert not blamed()
    keeper.after(9.5, steps=19)
    assert not blamed()
    keeper.after(0.5)
    wait_killed(keeper)


def test_pauses_grow_to_a_limit_and_shrink_when_one_has_run_for_long(keeper: Kept) -> None:
    pauses = []
    for _ in range(5):
        keeper.crash()
        before_s = keeper.clock.now_s
        while not keeper.pid:
            keeper.after(0.25)
        pauses.append(keeper.clock.now_s - before_s)
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]
    keeper.after(60.0, steps=60, beating=True)
    keeper.crash()
    keeper.after(0.25)
    assert keeper.pid == 0
    keeper.after(0.25)
    assert len(keeper.pids) == 7


# --- processes ---


def test_a_program_that_is_not_there_ends_with_127(capfd: pytest.CaptureFixture[str]) -> None:
    pid = processes.started(("no-such-program",), {"PATH": os.defpath})
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 127
    said = capfd.readouterr().err.splitlines()[-1]  # gRPC, where a test has loaded it, talks of the fork
    assert said == "no-such-program cannot be started: No such file or directory."


def test_children_are_known_until_their_end_was_told() -> None:
    pid = processes.started(("sleep", "600"), {"PATH": os.defpath})
    assert pid in processes.children()
    processes.send(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert pid in processes.children()
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert pid not in processes.children()
    processes.send(pid, signal.SIGKILL)  # gone already


def test_an_exit_code_stays_what_it_is() -> None:
    assert [processes.end_as(code << 8) for code in (0, 3, 255)] == [0, 3, 255]
