"""Which wanted shards run already, and the steps from one set of shards to another."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.order import ShardOrder
from orchestrator.core.rolling import (
    Launch,
    Member,
    Retire,
    Step,
    Wait,
    conflict,
    match,
    missing,
    step,
    victims_most,
)
from tgi_patches.contract import Role, ShardSpec


def spec(shard: str, role: Role = Role.DECODE, limit: int = 128) -> ShardSpec:
    return ShardSpec("d", shard, role, "/m", "m", max_concurrent_requests=limit)


def order(shard: str, role: Role = Role.DECODE, limit: int = 128, **more: object) -> ShardOrder:
    plain = spec(shard, role, limit).to_dict()
    return ShardOrder(**plain | {"image": "i:1"} | more)  # type: ignore[arg-type]


ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)


@st.composite
def sets(draw: st.DrawFn, least: int = 0) -> list[ShardSpec]:
    """Shards of few kinds under the names that a plan, and earlier rolls, give them."""
    kinds = draw(
        st.lists(st.tuples(st.sampled_from(ROLES), st.sampled_from((1, 2, 3))), min_size=least, max_size=7)
    )
    numbers = draw(st.permutations(range(8)))
    return [
        spec(f"{role}-{number}", role, limit) for (role, limit), number in zip(kinds, numbers, strict=False)
    ]


@given(wanted=sets(), running=sets())
def test_every_shard_is_in_exactly_one_place_and_as_many_as_can_be_are_kept(
    wanted: list[ShardSpec], running: list[ShardSpec]
) -> None:
    matched = match(wanted, running)
    kept = [one.order.shard for one in matched.keep]
    assert Counter([*kept, *matched.retire]) == Counter(one.shard for one in running)
    told = [one.wanted for one in matched.keep] + list(matched.launch)
    assert len(told) == len(wanted)
    kind = lambda one: (one.role, one.max_concurrent_requests)  # noqa: E731
    assert Counter(map(kind, told)) == Counter(map(kind, wanted))
    named = {one.shard: one for one in running}
    assert all(named[one.order.shard] == one.order for one in matched.keep)
    assert all(kind(one.wanted) == kind(one.order) for one in matched.keep)
    assert len(kept) == sum((Counter(map(kind, wanted)) & Counter(map(kind, running))).values())
    names = [one.shard for one in matched.launch]
    assert len(set(names)) == len(names)
    assert not set(names) & set(named)


@given(running=sets())
def test_what_runs_is_matched_with_itself_by_its_names(running: list[ShardSpec]) -> None:
    matched = match(running, running)
    assert [(one.wanted, one.order) for one in matched.keep] == [(one, one) for one in running]
    assert (matched.launch, matched.retire) == ((), ())


@pytest.mark.parametrize(
    "change",
    [
        {"shard": "decode-7"},
        {"port": 3110},
        {"cpus": (4,)},
        {"gpus": ("GPU-b",)},
    ],
)
def test_where_a_shard_is_makes_no_other_shard_of_it(change: dict[str, object]) -> None:
    wanted, runs = order("decode-0", port=3100), order("decode-0", port=3100)
    runs = replace(runs, **change)  # type: ignore[arg-type]
    (kept,) = match([wanted], [runs]).keep
    assert kept.order == runs


@pytest.mark.parametrize(
    "change",
    [
        {"args": ("--quantize", "fp8")},
        {"env": {"A": "1"}},
        {"image": "i:2"},
        {"memory_bytes": 1},
        {"max_total_tokens": 5000},
        {"role": Role.MIXED},
        {"tensor_parallel": 2},
        {"sidecar_port": 3101},
        {"tgi_env": {"B": "2"}},
        {"mps_percent": 50, "gpu_memory_fraction": 0.4},
    ],
)
def test_what_a_shard_is_makes_another_one_of_it(change: dict[str, object]) -> None:
    wanted = replace(order("decode-0"), **change)  # type: ignore[arg-type]
    matched = match([wanted], [order("decode-0")])
    assert (matched.keep, matched.retire) == ((), ("decode-0",))


def test_a_plain_spec_and_an_order_that_adds_nothing_are_the_same_shard() -> None:
    as_order = ShardOrder(**spec("decode-0").to_dict())
    assert match([spec("decode-0")], [as_order]).launch == ()
    (kept,) = match([as_order], [replace(spec("decode-0"), port=20_123)]).keep
    assert kept.order.port == 0, "the launcher chooses again"


def test_named_gpus_must_be_those_and_the_others_go_where_they_still_can() -> None:
    wanted = [order("decode-0"), order("decode-1", gpus=("GPU-a", "GPU-b"), gpus_named=True)]
    running = [order("decode-0", gpus=("GPU-b", "GPU-a")), order("decode-1", gpus=("GPU-c", "GPU-d"))]
    assert {one.wanted.shard: one.order.shard for one in match(wanted, running).keep} == {
        "decode-0": "decode-1",
        "decode-1": "decode-0",
    }
    moved = order("decode-0", gpus=("GPU-x",), gpus_named=True)
    assert match([moved], [order("decode-0", gpus=("GPU-a",))]).retire == ("decode-0",)
    chosen = replace(moved, gpus_named=False)
    (kept,) = match([chosen], [order("decode-0", gpus=("GPU-a",))]).keep
    assert kept.order == order("decode-0", gpus=("GPU-a",))


def test_a_named_port_for_records_must_be_that_one_and_any_port_is_any() -> None:
    at = lambda port: replace(spec("prefill-0", Role.PREFILL), pull_listen=f"10.0.0.1:{port}")  # noqa: E731
    assert match([at(3101)], [at(3101)]).launch == ()
    assert match([at(0)], [at(3101)]).launch == ()
    assert match([at(3102)], [at(3101)]).retire == ("prefill-0",)
    assert "port 3101" in conflict(at(3101), [at(3101)])
    assert conflict(at(3102), [at(3101)]) == conflict(at(0), [at(0)]) == ""


def test_new_names_are_free_and_no_other_new_one_loses_its_own() -> None:
    wanted = [spec(f"decode-{n}", limit=9) for n in range(3)]
    matched = match(wanted, [spec("decode-0"), spec("decode-3")])
    assert [one.shard for one in matched.launch] == ["decode-4", "decode-1", "decode-2"]


def test_only_what_nothing_stands_in_for_is_missing() -> None:
    wanted = [spec("prefill-0", Role.PREFILL), spec("decode-0", limit=9), spec("decode-1", limit=9)]
    assert [one.shard for one in missing(wanted, [])] == ["prefill-0", "decode-0", "decode-1"]
    assert [one.shard for one in missing(wanted, [spec("decode-0")])] == ["prefill-0", "decode-1"]
    assert missing(wanted, wanted) == ()


def test_a_gpu_is_for_one_shard_unless_both_take_a_share() -> None:
    share = {"gpus": ("GPU-a",), "mps_percent": 50, "gpu_memory_fraction": 0.5}
    assert conflict(order("decode-1", **share), [order("decode-0", **share)]) == ""
    assert "GPU-a" in conflict(order("decode-1", **share), [order("decode-0", gpus=("GPU-a",))])
    more = share | {"mps_percent": 60}
    assert "GPU-a" in conflict(order("decode-1", **more), [order("decode-0", **share)])


def test_as_many_may_go_as_have_the_ranks_of_the_new_one() -> None:
    one, two, four = (replace(spec("decode-0"), tensor_parallel=n) for n in (1, 2, 4))
    assert [victims_most(four, one), victims_most(four, two), victims_most(one, four)] == [4, 2, 1]


# --- steps --------------------------------------------------------------------------------------


def all_steps(wanted: list[ShardSpec], fleet: dict[str, Member]) -> list[Step]:
    """With room for all, and new shards that get ready at once."""
    taken: list[Step] = []
    while (now := step(wanted, list(fleet.values()))) is not None:
        assert len(taken) < 40, "it does not end"
        taken.append(now)
        match now:
            case Launch(new, _):
                assert new.shard not in fleet
                fleet[new.shard] = Member(new)
            case Retire(shard):
                del fleet[shard]
            case Wait(shard):
                fleet[shard] = replace(fleet[shard], ready=True)
    return taken


@given(wanted=sets(least=1), running=sets(), ready=st.lists(st.booleans(), min_size=7, max_size=7))
def test_with_room_no_role_ever_serves_with_fewer_than_it_had_or_shall_have(
    wanted: list[ShardSpec], running: list[ShardSpec], ready: list[bool]
) -> None:
    fleet = {one.shard: Member(one, ready=up) for one, up in zip(running, ready, strict=False)}

    def serving(role: Role) -> int:
        return sum(member.ready for member in fleet.values() if member.order.role == role)

    had = {role: serving(role) for role in ROLES}
    shall = Counter(one.role for one in wanted)
    taken = 0
    while (now := step(wanted, list(fleet.values()))) is not None:
        taken += 1
        assert taken < 60, "it does not end"
        match now:
            case Launch(new, _):
                assert new.shard not in fleet
                fleet[new.shard] = Member(new)
            case Retire(shard):
                del fleet[shard]
            case Wait(shard):
                assert not fleet[shard].ready
                fleet[shard] = replace(fleet[shard], ready=True)
        for role in ROLES:
            assert serving(role) >= min(had[role], shall[role])
            assert sum(one.order.role == role for one in fleet.values()) <= 1 + max(
                shall[role], sum(one.role == role for one in running)
            )
    kind = lambda one: (one.role, one.max_concurrent_requests)  # noqa: E731
    assert Counter(kind(one.order) for one in fleet.values()) == Counter(map(kind, wanted))


def test_each_old_one_goes_after_a_new_one_has_come() -> None:
    wanted = [spec(f"decode-{n}", limit=9) for n in range(2)]
    fleet = {f"decode-{n}": Member(spec(f"decode-{n}")) for n in range(2)}
    told = [one.order.shard if isinstance(one, Launch) else one for one in all_steps(wanted, fleet)]
    assert told == ["decode-2", Retire("decode-1"), "decode-1", Retire("decode-0")]


def test_a_new_kind_is_proved_before_a_single_old_one_goes_also_where_fewer_are_wanted() -> None:
    fleet = {f"decode-{n}": Member(spec(f"decode-{n}")) for n in range(3)}
    first, *rest = all_steps([spec("decode-0", limit=9)], fleet)
    assert isinstance(first, Launch)
    assert rest == [Retire("decode-2"), Retire("decode-1"), Retire("decode-0")]


def test_a_role_that_is_given_up_goes_when_the_others_are_there() -> None:
    fleet = {"mixed-0": Member(spec("mixed-0", Role.MIXED))}
    pair = [spec("prefill-0", Role.PREFILL), spec("decode-0")]
    assert all_steps(pair, fleet) == [
        Launch(pair[0], "mixed-0"),
        Launch(pair[1], "mixed-0"),
        Retire("mixed-0"),
    ]


def test_what_does_not_serve_goes_first_and_what_serves_waits_for_others() -> None:
    fleet = [Member(spec("decode-0"), ready=False), Member(spec("decode-1")), Member(spec("decode-2"))]
    assert step([spec("decode-0")], fleet) == Wait("decode-0"), "it is the one that is kept"
    drained = [Member(spec("decode-0")), Member(spec("decode-1"), held=True), Member(spec("decode-2"))]
    new = [Member(spec("decode-3", limit=9))]
    assert step([spec("a", limit=9), spec("b", limit=9)], [*drained, *new]) == Retire("decode-1")
    late = [Member(spec("decode-3", limit=9), ready=False), Member(spec("decode-0"))]
    assert step([spec("decode-3", limit=9)], late) == Wait("decode-3")
    held = [replace(late[0], held=True), late[1]]
    assert step([spec("decode-3", limit=9)], held) == Retire("decode-0"), "nobody waits for an operator"


def test_what_is_in_the_way_makes_room() -> None:
    running = [Member(order(f"decode-{n}", gpus=(f"GPU-{n}",))) for n in range(3)]
    wanted = [replace(order("decode-9"), gpus=("GPU-1",), image="i:2")]
    now = step(wanted, running)
    assert isinstance(now, Launch)
    assert now.instead == "decode-1"
