from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.shard import (
    Answered,
    Drained,
    Exited,
    GivenBack,
    Launched,
    Missed,
    Observation,
    Rules,
    ShardState,
    Watched,
    backoff_s,
    observe,
)
from tgi_patches.contract import PROTOCOL_VERSION, Fingerprint, Limits, Role, StatusReply

RULES = Rules(misses_to_suspect=2, silent_dead_s=30.0, start_dead_s=600.0, calm_s=60.0)


def status(epoch: int = 7, shard: str = "decode-0") -> StatusReply:
    return StatusReply(
        protocol=PROTOCOL_VERSION,
        deployment="d",
        shard=shard,
        role=Role.DECODE,
        epoch=epoch,
        fingerprint=Fingerprint("m", "r", "t", "float32", "float32", 2, 1, 8),
        limits=Limits(100, 200),
        kv_tokens=1600,
        slots=8,
        ring_bytes=1000,
        record_limit_bytes=250,
        bytes_per_token=4,
        hooked=False,
    )


def after(*observations: tuple[float, Observation], start: Watched | None = None) -> Watched:
    watched = start or Watched("decode-0", Role.DECODE)
    for now_s, observation in observations:
        watched = observe(watched, observation, now_s, RULES)
    return watched


UP: tuple[tuple[float, Observation], ...] = ((0.0, Launched("http://a:1")), (3.0, Answered(status())))


def test_a_launched_shard_is_ready_with_its_first_answer() -> None:
    assert after(UP[0]).state == "starting"
    assert after(UP[0]).view() is None
    roomy = after(UP[0], (3.0, Answered(replace(status(), pinned_bytes=4096)))).view()
    assert roomy is not None
    assert roomy.pinned_bytes == 4096
    ready = after(*UP)
    assert (ready.state, ready.epoch, ready.url) == ("ready", 7, "http://a:1")


def test_the_view_carries_what_the_shard_answered() -> None:
    view = after(*UP).view()
    assert view is not None
    assert (view.shard, view.epoch, view.url, view.state) == ("decode-0", 7, "http://a:1", "ready")
    assert (view.kv_tokens, view.slots, view.ring_bytes, view.record_limit_bytes) == (1600, 8, 1000, 250)
    assert (view.bytes_per_token, view.hooked, view.limits.max_total_tokens) == (4, False, 200)


@pytest.mark.parametrize(
    ("launched_at", "told", "expected"),
    [("", "", ""), ("", "10.1.0.2", "10.1.0.2"), ("10.2.0.2", "10.1.0.2", "10.2.0.2")],
)
def test_where_others_pull_is_what_its_launcher_knows_or_else_what_it_says(
    launched_at: str, told: str, expected: str
) -> None:
    launched = Launched("http://a:1", pull_host=launched_at)
    view = after((0.0, launched), (1.0, Answered(replace(status(), pull_host=told)))).view()
    assert view is not None
    assert view.pull_host == expected


def test_one_miss_is_forgiven_and_two_in_a_row_make_it_suspect() -> None:
    once = after(*UP, (4.0, Missed()))
    assert once.state == "ready"
    assert after((5.0, Missed()), start=once).state == "suspect"
    assert after((5.0, Answered(status())), (6.0, Missed()), start=once).state == "ready"


def test_a_suspect_shard_that_answers_is_ready_again() -> None:
    assert after(*UP, (4.0, Missed()), (5.0, Missed()), (6.0, Answered(status()))).state == "ready"


def test_misses_while_starting_mean_nothing_until_the_start_takes_too_long() -> None:
    starting = after(UP[0], *((float(s), Missed()) for s in range(1, 500)))
    assert starting.state == "starting"
    assert after((599.9, Missed()), start=starting).state == "starting"
    assert after((600.0, Missed()), start=starting).state == "dead"


def test_silence_since_the_last_answer_is_death() -> None:
    silent = after(*UP, (4.0, Missed()), (5.0, Missed()))
    assert after((32.9, Missed()), start=silent).state == "suspect"
    assert after((33.0, Missed()), start=silent).state == "dead"


@pytest.mark.parametrize(
    "before", [UP[:1], UP, (*UP, (4.0, Missed()), (5.0, Missed())), (*UP, (4.0, Drained()))]
)
def test_an_exit_is_death_at_once_from_any_state(before: tuple[tuple[float, Observation], ...]) -> None:
    assert after(*before, (9.0, Exited())).state == "dead"


def test_a_late_answer_revives_neither_the_dead_nor_the_next_incarnation() -> None:
    dead = after(*UP, (9.0, Exited()))
    assert after((9.1, Answered(status(epoch=7))), start=dead).state == "dead"
    again = after((9.1, Launched("http://a:2")), (9.2, Answered(status(epoch=7))), start=dead)
    assert again.state == "starting"
    fresh = after((9.3, Answered(status(epoch=8))), start=again)
    assert (fresh.state, fresh.epoch) == ("ready", 8)


def test_an_answer_with_another_epoch_is_a_new_incarnation() -> None:
    assert after(*UP, (4.0, Answered(status(epoch=9)))).epoch == 9


def test_an_answer_of_another_shard_counts_as_a_miss() -> None:
    foreign = Answered(status(shard="prefill-0"))
    assert after(UP[0], (1.0, foreign)).state == "starting"
    assert after(*UP, (4.0, foreign), (5.0, foreign)).state == "suspect"


def test_what_was_drained_comes_back_as_what_it_is_known_to_be() -> None:
    back = (9.0, GivenBack())
    assert after(UP[0], (1.0, Drained()), back).state == "starting"
    assert after(*UP, (4.0, Drained()), (8.0, Answered(status())), back).state == "ready"
    silent = after(*UP, (4.0, Drained()), (8.0, Missed()), back)
    assert silent.state == "suspect"
    assert after((10.0, Answered(status())), start=silent).state == "ready"


@pytest.mark.parametrize(
    "before", [UP[:1], UP, (*UP, (4.0, Missed()), (5.0, Missed())), (*UP, (4.0, Exited()))]
)
def test_giving_back_what_was_not_drained_changes_nothing(
    before: tuple[tuple[float, Observation], ...],
) -> None:
    assert after(*before, (9.0, GivenBack())) == after(*before)


def test_draining_survives_answers_and_misses_until_the_end() -> None:
    draining = after(*UP, (4.0, Drained()))
    assert draining.state == "draining"
    assert after((5.0, Answered(status())), start=draining).state == "draining"
    assert after((5.0, Missed()), (6.0, Missed()), start=draining).state == "draining"
    assert after((5.0, Exited()), (6.0, Drained()), start=draining).state == "dead"


def test_quick_ends_count_up_and_a_calm_run_starts_over() -> None:
    watched = Watched("decode-0", Role.DECODE)
    for count in (1, 2, 3):
        watched = after((0.0, Launched("u")), (1.0, Exited()), start=watched)
        assert watched.failures == count
    calm = after((0.0, Launched("u")), (1.0, Answered(status())), (60.0, Exited()), start=watched)
    assert calm.failures == 1
    # Silent for a minute is not calm: it never answered.
    mute = after((0.0, Launched("u")), (60.0, Exited()), start=watched)
    assert mute.failures == 4


def test_a_silent_shard_that_then_exits_counts_one_failure() -> None:
    silent = after(*UP, (40.0, Missed()))
    assert (silent.state, silent.failures) == ("dead", 1)
    assert after((41.0, Exited()), start=silent).failures == 1


def test_back_off_doubles_from_half_a_second_to_thirty() -> None:
    assert [backoff_s(n) for n in (1, 2, 3, 4, 7, 8, 1000)] == [0.5, 1.0, 2.0, 4.0, 30.0, 30.0, 30.0]


OBSERVATIONS = st.one_of(
    st.builds(Launched, st.just("u")),
    st.builds(lambda epoch: Answered(status(epoch)), st.integers(1, 3)),
    st.just(Missed()),
    st.just(Drained()),
    st.just(Exited()),
)


@given(st.lists(st.tuples(st.floats(0, 20), OBSERVATIONS), max_size=40))
def test_ready_means_answered_since_the_launch_and_few_misses(
    steps: list[tuple[float, Observation]],
) -> None:
    watched, now_s, answered_since_launch = Watched("decode-0", Role.DECODE), 0.0, False
    for pause_s, observation in steps:
        now_s += pause_s
        before, watched = watched, observe(watched, observation, now_s, RULES)
        if isinstance(observation, Launched):
            answered_since_launch = False
        elif isinstance(observation, Answered):
            answered_since_launch = True
        if watched.state is ShardState.READY:
            assert answered_since_launch
            assert watched.misses < 2
        if before.state is ShardState.DEAD and not isinstance(observation, Launched):
            assert watched == replace(before, misses=watched.misses)
