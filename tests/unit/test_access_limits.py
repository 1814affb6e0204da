from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from orchestrator.access import Access, Visit
from orchestrator.access.tally import ROWS, Tally
from orchestrator.access.window import Limits, retry_after_s
from orchestrator.errors import ConfigError, Overloaded, Unauthorized
from orchestrator.settings import GatewaySection

KEY = "sk-0123456789abcdef"
OTHER = "sk-fedcba9876543210"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class House:
    """One keys file, one shared folder, one clock, and any number of workers."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.file = folder / "keys.yaml"
        self.shared = folder / "limits"
        self.clock = Clock()
        self._stack = stack

    def keys(self, text: str) -> None:
        self.file.write_text(f"keys: {{{text}}}", encoding="utf-8")
        self.file.chmod(0o600)

    def limits(self, **limits: int) -> None:
        told = "".join(f", {name}: {most}" for name, most in limits.items())
        self.keys(f"a: {{key: {KEY}{told}}}")

    def worker(self, number: int = 0, workers: int = 2) -> Access:
        gateway = GatewaySection(keys_file=self.file, workers=workers)
        access = Access.open(gateway, {}, self.shared, number, now_s=self.clock)
        self._stack.callback(access.close)
        return access


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with contextlib.ExitStack() as stack:
        yield House(tmp_path, stack)


def visit(access: Access, key: str = KEY) -> Visit:
    return access.visit("POST", "/generate", {b"authorization": b"Bearer " + key.encode()})


def refused(access: Access, key: str = KEY) -> int:
    """Seconds to wait."""
    with pytest.raises(Overloaded) as caught:
        visit(access, key)
    assert caught.value.retry_after is not None
    return int(caught.value.retry_after)


# --- one worker -----------------------------------------------------------------------------------


def test_concurrent_requests_are_bounded_until_one_leaves(house: House) -> None:
    house.limits(concurrent_requests=2)
    access = house.worker()
    first, second = visit(access), visit(access)
    assert refused(access) == 1
    first.leave()
    first.leave(tokens=5)
    third = visit(access)
    assert refused(access) == 1
    second.leave()
    third.leave()
    visit(access)
    visit(access)
    assert refused(access) == 1


def test_the_wait_that_is_told_is_enough_and_not_a_second_too_long(house: House) -> None:
    house.limits(requests_per_minute=2)
    access = house.worker()
    house.clock.now_s = 1001.0
    visit(access).leave()
    house.clock.now_s = 1017.0
    visit(access).leave()
    house.clock.now_s = 1020.5
    # 1001 lies in the step 1000..1005, which is a whole minute ago at 1065.
    assert refused(access) == 45
    house.clock.now_s = 1064.9
    assert refused(access) == 1
    house.clock.now_s = 1065.0
    visit(access).leave()
    assert refused(access) == 15


def test_a_refused_request_counts_for_nothing(house: House) -> None:
    house.limits(requests_per_minute=1, concurrent_requests=1)
    access = house.worker()
    visit(access).leave()
    for _ in range(5):
        refused(access)
    house.clock.now_s += 65
    visit(access).leave()


def test_tokens_are_paid_afterwards_and_bound_what_comes_next(house: House) -> None:
    house.limits(tokens_per_minute=100)
    access = house.worker()
    visit(access).leave(tokens=99)
    long = visit(access)
    long.leave(tokens=5000)
    house.clock.now_s = 1003.0
    assert refused(access) == 62
    house.clock.now_s = 1065.0
    visit(access).leave(tokens=1)


def test_a_key_without_limits_is_not_counted(house: House) -> None:
    house.keys(f"a: {KEY}")
    access = house.worker()
    for _ in range(1000):
        visit(access)


def test_each_key_has_limits_of_its_own(house: House) -> None:
    house.keys(f"a: {{key: {KEY}, concurrent_requests: 1}}, b: {{key: {OTHER}, concurrent_requests: 1}}")
    access = house.worker()
    visit(access)
    visit(access, OTHER)
    refused(access)
    refused(access, OTHER)


def test_the_sentence_names_the_key_and_never_shows_it(house: House) -> None:
    house.limits(concurrent_requests=1)
    access = house.worker()
    visit(access)
    with pytest.raises(Overloaded, match=r"^The API key a has 1 requests under way, its most\.$"):
        visit(access)


# --- workers together -----------------------------------------------------------------------------


def test_limits_hold_over_all_workers(house: House) -> None:
    house.limits(concurrent_requests=2, requests_per_minute=3, tokens_per_minute=100)
    one, two = house.worker(0), house.worker(1)
    first, second = visit(one), visit(two)
    assert refused(one) == refused(two) == 1
    first.leave(tokens=60)
    visit(two).leave()
    assert refused(one) == refused(two) == 65  # three requests within the minute
    house.clock.now_s = 1030.0
    second.leave(tokens=40)
    house.clock.now_s = 1065.0
    visit(one).leave()  # 60 of the tokens are a minute ago, 40 are not
    house.clock.now_s = 1066.0
    visit(one).leave(tokens=60)
    assert refused(two) == 29  # until the 40 of 1030 are


def test_a_worker_that_learns_of_a_key_later_sees_what_others_count(house: House) -> None:
    house.keys(f"b: {{key: {OTHER}, concurrent_requests: 1}}")
    one, two = house.worker(0), house.worker(1)
    visit(two, OTHER)
    refused(one, OTHER)
    house.limits(concurrent_requests=1)
    one.reload()
    visit(one)
    two.reload()
    refused(two)


DYING = """
import sys
import tempfile
from pathlib import Path
from orchestrator.access import Access
from orchestrator.settings import GatewaySection

access = Access.open(GatewaySection(keys_file=Path(sys.argv[1]), workers=2), {}, Path(sys.argv[2]), 1)
shown = {b"authorization": b"Bearer " + sys.argv[3].encode()}
held = [access.visit("POST", "/generate", shown) for _ in "ab"]
print("holds", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_worker_left_open_is_free_at_once_and_its_requests_still_count(house: House) -> None:
    house.limits(concurrent_requests=2, requests_per_minute=5)
    command = [sys.executable, "-c", DYING, str(house.file), str(house.shared), KEY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while process.stdout.readline() not in ("holds\n", ""):
                pass
            access = Access.open(GatewaySection(keys_file=house.file, workers=2), {}, house.shared, 0)
            with contextlib.closing(access):
                assert refused(access) == 1
                with pytest.raises(ConfigError, match="limits-1 is held by another process"):
                    house.worker(1)
                process.send_signal(signal.SIGKILL)
                process.wait()
                visit(access).leave()
                with contextlib.closing(
                    Access.open(GatewaySection(keys_file=house.file, workers=2), {}, house.shared, 1)
                ) as successor:
                    visit(successor)
                    visit(successor)
                    assert refused(access) == 1
                # The successor closed with two open: it is dead as well, and five have come.
                assert refused(access) > 1
        finally:
            process.kill()


def test_a_folder_that_cannot_be_used_is_named(house: House, tmp_path: Path) -> None:
    house.limits(concurrent_requests=1)
    house.shared.write_text("a file")
    with pytest.raises(
        ConfigError, match=r"Limits cannot be counted in .*limits: (File exists|Not a directory)\."
    ):
        house.worker()


def test_a_worker_that_could_not_start_holds_nothing(house: House) -> None:
    house.keys("a: short")
    with pytest.raises(ConfigError, match="the key of a must be"):
        house.worker()
    house.limits(concurrent_requests=1)
    visit(house.worker())


def test_a_file_of_another_version_is_begun_anew(house: House) -> None:
    house.limits(concurrent_requests=1)
    house.shared.mkdir()
    (house.shared / "limits-0").write_bytes(b"\xff" * 5000)
    access = house.worker()
    visit(access)
    refused(access)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_was_counted_before_the_machine_was_started_again_counts_no_more(house: House) -> None:
    house.limits(requests_per_minute=1)
    house.clock.now_s = 100_000.0
    for number in (0, 1):
        access = house.worker(number)
        visit(access).leave()
        access.close()
        house.clock.now_s += 65
    house.clock.now_s = 12.0  # the clock begins anew, and worker 1 has not started yet
    access = house.worker(0)
    visit(access).leave()
    refused(access)
    house.clock.now_s = 75.0
    visit(access).leave()


def test_nothing_of_a_worker_stays_open(house: House) -> None:
    house.limits(concurrent_requests=1)
    before = open_files()
    access = house.worker(0, workers=4)
    open_visit = visit(access)
    access.close()
    access.close()
    open_visit.leave(tokens=3)
    assert open_files() == before
    with pytest.raises(Overloaded, match="shutting down"):
        visit(access)


# --- a keys file that changes ---------------------------------------------------------------------


def test_a_removed_key_is_refused_while_its_open_request_ends_well(house: House) -> None:
    house.keys(f"a: {{key: {KEY}, concurrent_requests: 1}}, b: {{key: {OTHER}, concurrent_requests: 1}}")
    access = house.worker()
    open_visit, other = visit(access), visit(access, OTHER)
    house.keys(f"b: {{key: {OTHER}, concurrent_requests: 1}}")
    access.reload()
    with pytest.raises(Unauthorized):
        visit(access)
    house.limits(concurrent_requests=1)
    access.reload()
    assert refused(access) == 1  # the same name is back, and its request is still open
    open_visit.leave()
    other.leave()
    visit(access)


def test_a_renamed_key_begins_anew_and_the_old_name_is_left_properly(house: House) -> None:
    house.limits(concurrent_requests=1)
    access = house.worker()
    old = visit(access)
    house.keys(f"b: {{key: {KEY}, concurrent_requests: 1}}")
    access.reload()
    new = visit(access)
    assert (old.key_name, new.key_name) == ("a", "b")
    old.leave()
    assert refused(access) == 1
    new.leave()
    visit(access)


def test_another_secret_under_the_same_name_keeps_the_counts(house: House) -> None:
    house.limits(concurrent_requests=1)
    access = house.worker()
    visit(access)
    house.keys(f"a: {{key: {OTHER}, concurrent_requests: 1}}")
    access.reload()
    with pytest.raises(Unauthorized):
        visit(access)
    assert refused(access, OTHER) == 1


def test_a_new_limit_holds_from_the_reload_on(house: House) -> None:
    house.limits(concurrent_requests=5)
    access = house.worker()
    visit(access)
    house.limits(concurrent_requests=1)
    access.reload()
    assert refused(access) == 1


@pytest.mark.parametrize("broken", [f"keys: {{a: {OTHER}, b: 1}}", "keys: {a: [", None])
def test_a_broken_file_changes_nothing_and_is_logged_without_a_key(house: House, broken: str | None) -> None:
    house.limits(concurrent_requests=1)
    access = house.worker()
    if broken is None:
        house.file.unlink()
    else:
        house.file.write_text(broken)
    with capture_logs() as logs:
        access.reload()
    assert [line["event"] for line in logs] == ["not_reloaded"]
    assert OTHER not in str(logs)
    visit(access)
    assert refused(access) == 1


def test_rows_are_used_again_once_their_minute_is_over() -> None:
    tally = Tally(None, 0, 1)
    tally.take([f"old{number}" for number in range(ROWS)], 100)
    with pytest.raises(ConfigError, match=f"At most {ROWS} API keys can have limits"):
        tally.take(["new"], 112)
    rows = tally.take(["new", "old7"], 113)
    assert len({at for _, at in rows.values()}) == 2
    tally.close()


def test_a_row_with_an_open_request_is_kept() -> None:
    tally = Tally(None, 0, 1)
    rows = tally.take([f"old{number}" for number in range(ROWS)], 100)
    for _, at in rows.values():
        tally.add(at, 100, requests=1, opened=1)
    with pytest.raises(ConfigError, match=f"At most {ROWS} API keys can have limits"):
        tally.take(["new"], 200)
    tally.add(rows["old5"][1], 100, opened=-1)
    assert tally.take(["new"], 200)["new"][1] == rows["old5"][1]
    tally.close()


def test_more_keys_with_limits_than_rows_are_refused() -> None:
    tally = Tally(None, 0, 1)
    with pytest.raises(ConfigError, match=f"At most {ROWS} API keys can have limits"):
        tally.take([f"k{number}" for number in range(ROWS + 1)], 0)
    tally.close()


# --- any course of events -------------------------------------------------------------------------

pauses_s = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.4, 1.0, 4.9, 5.0, 13.0, 29.5, 61.0, 700.0])),
    max_size=60,
)


@settings(max_examples=50, deadline=None)  # files are made for each
@given(pauses_s, st.integers(1, 6))
def test_no_minute_holds_more_than_the_limit_and_none_is_held_back_longer_than_a_step(
    arrivals: list[tuple[int, float]], most: int
) -> None:
    clock = Clock()
    admitted: list[float] = []
    with three_workers(clock, most) as workers:
        for number, pause_s in arrivals:
            clock.now_s += pause_s
            within_65_s = [at for at in admitted if at > clock.now_s - 65]
            wait_s = asked(workers[number])
            if wait_s is not None:
                assert len(within_65_s) >= most
                assert 1 <= wait_s <= 65
            else:
                assert len([at for at in admitted if at > clock.now_s - 60]) < most
                admitted.append(clock.now_s)


def asked(access: Access) -> int | None:
    """None when served, else the seconds to wait."""
    try:
        visit(access).leave()
    except Overloaded as error:
        return int(error.retry_after or 0)
    return None


@contextlib.contextmanager
def three_workers(clock: Clock, most: int) -> Iterator[list[Access]]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        house = House(Path(folder), stack)
        house.clock = clock
        house.limits(requests_per_minute=most)
        yield [house.worker(number, workers=3) for number in range(3)]


eighths_s = st.integers(0, 64 * 8).map(lambda number: number / 8)


@given(
    st.lists(st.tuples(eighths_s, st.integers(1, 50)), max_size=20),
    st.integers(0, 100),
    eighths_s.map(lambda more_s: 100 + more_s),
)
def test_the_wait_is_the_first_whole_second_at_which_enough_has_left(
    counts: list[tuple[float, int]], most: int, now_s: float
) -> None:
    """Against the definition: what came in a step counts until that step is a whole minute ago."""
    came = [(int((now_s - age_s) // 5), count) for age_s, count in counts]

    def in_window(at_s: float) -> int:
        return sum(count for step, count in came if at_s < (step + 13) * 5)

    wait_s = retry_after_s(now_s, most, lambda first: sum(count for step, count in came if step >= first))
    assert in_window(now_s + wait_s) <= most
    if in_window(now_s) > most and wait_s > 1:
        assert in_window(now_s + wait_s - 1) > most


def test_limits_know_whether_there_are_any() -> None:
    assert not Limits().any
    assert all(limits.any for limits in (Limits(1), Limits(None, 1), Limits(None, None, 1)))
