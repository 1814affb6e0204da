"""What the settings say against what runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.commands.apply import lines
from orchestrator.config import load_settings
from orchestrator.core.difference import Change, ShardChange, difference, restart_settings
from orchestrator.core.order import ShardOrder
from tgi_patches.contract import Role, ShardSpec


def order(shard: str, role: Role = Role.DECODE, **more: object) -> ShardOrder:
    plain = ShardSpec("d", shard, role, "/m", "m").to_dict()
    return ShardOrder(**plain | {"image": "i:1"} | more)  # type: ignore[arg-type]


PAIR = [order("prefill-0", Role.PREFILL), order("decode-0")]


def test_nothing_differs_wherever_the_shards_are() -> None:
    moved = [replace(PAIR[0], port=3100), replace(PAIR[1], shard="decode-4", gpus=("GPU-a",), cpus=(3,))]
    found = difference(PAIR, moved)
    assert not found
    assert found.same == ("prefill-0", "decode-4")
    assert list(lines(found)) == []


def test_a_changed_field_is_told_with_both_values() -> None:
    wanted = [PAIR[0], replace(PAIR[1], args=("--quantize", "fp8"), max_total_tokens=5000)]
    found = difference(wanted, PAIR)
    assert found.changed == (
        ShardChange(
            "decode-0",
            (Change("max_total_tokens", 4096, 5000), Change("args", (), ("--quantize", "fp8"))),
        ),
    )
    assert (found.added, found.removed, found.same) == ((), (), ("prefill-0",))
    assert list(lines(found)) == [
        "[yellow]~[/] decode-0",
        "    max_total_tokens: 4096 -> 5000",
        '    args: [] -> ["--quantize", "fp8"]',
    ]
    assert found.to_dict()["changed"][0]["changes"][0] == {
        "name": "max_total_tokens",
        "old": 4096,
        "new": 5000,
    }


def test_gpus_that_placement_chose_are_none() -> None:
    runs = [PAIR[0], replace(PAIR[1], gpus=("GPU-a",))]
    assert not difference([PAIR[0], replace(PAIR[1], gpus=("GPU-b",))], runs)


def test_gpus_that_a_shard_must_have_now_are_a_change() -> None:
    runs = [PAIR[0], replace(PAIR[1], gpus=("GPU-a",))]
    found = difference([PAIR[0], replace(PAIR[1], gpus=("GPU-b",), gpus_named=True)], runs)
    assert found.changed == (ShardChange("decode-0", (Change("gpus", ("GPU-a",), ("GPU-b",)),)),)


def test_a_named_port_for_records_is_told_whole() -> None:
    at = lambda port: replace(PAIR[0], pull_listen=f"10.0.0.1:{port}")  # noqa: E731
    (changed,) = difference([at(3102)], [at(3101)]).changed
    assert changed.changes == (Change("pull_listen", "10.0.0.1:3101", "10.0.0.1:3102"),)


def test_counts_are_new_shards_or_fewer_ones() -> None:
    more = difference([*PAIR, order("decode-1")], PAIR)
    assert ([one.shard for one in more.added], more.removed, more.changed) == (["decode-1"], (), ())
    fewer = difference(PAIR, [*PAIR, order("decode-1")])
    assert (fewer.added, fewer.removed) == ((), ("decode-1",))
    assert list(lines(more)) == ["[green]+[/] decode-1"]
    assert list(lines(fewer)) == ["[red]-[/] decode-1"]
    mixed = difference([order("mixed-0", Role.MIXED)], PAIR)
    assert ([one.shard for one in mixed.added], mixed.removed) == (["mixed-0"], ("prefill-0", "decode-0"))


KINDS = st.lists(st.tuples(st.sampled_from([*Role]), st.sampled_from((1, 2))), max_size=6)


def shards(kinds: list[tuple[Role, int]]) -> list[ShardOrder]:
    return [order(f"{role}-{i}", role, memory_bytes=size) for i, (role, size) in enumerate(kinds)]


@given(wanted=KINDS, running=KINDS)
def test_each_running_shard_is_told_once_and_the_counts_add_up(
    wanted: list[tuple[Role, int]], running: list[tuple[Role, int]]
) -> None:
    found = difference(shards(wanted), shards(running))
    told = [*found.removed, *found.same, *(one.shard for one in found.changed)]
    assert Counter(told) == Counter(one.shard for one in shards(running))
    assert len(found.added) + len(found.same) + len(found.changed) == len(wanted)
    assert all(one.changes for one in found.changed)
    assert bool(found) == (Counter(wanted) != Counter(running))


# --- settings -----------------------------------------------------------------------------------


def settings(**flags: object) -> dict[str, object]:
    return load_settings(None, {name.replace("__", "."): value for name, value in flags.items()}, {}).told()


@pytest.mark.parametrize(
    ("flags", "restart", "foundation"),
    [
        ({"shards__decode__count": 3}, False, False),
        ({"limits__max_total_tokens": 5000}, False, False),
        ({"arena__bytes": 10_000_000}, False, False),
        ({"gateway__listen": "127.0.0.1:3111"}, True, False),
        ({"limits__queue_size": 5}, True, False),
        ({"routing__choice": "mixed"}, True, False),
        ({"redis__url": "redis://h:6379/0"}, True, False),
        ({"model__id": "other/model"}, True, True),
        ({"model__dtype": "float32"}, True, True),
        ({"launcher": "docker"}, True, True),
        ({"deployment": "other"}, True, True),
        ({"arena__dir": "/dev/shm/x"}, True, True),
        ({"shards__decode__urls": ["http://10.0.0.1:3001"]}, True, True),
    ],
)
def test_what_only_a_restart_brings_is_told_and_what_must_not_change_under_way(
    flags: dict[str, object], restart: bool, foundation: bool
) -> None:
    found = restart_settings(settings(), settings(**flags))
    (key,) = [name.replace("__", ".") for name in flags]
    assert [change.name for change in found.changes] == ([key] if restart else [])
    assert found.foundations == ((key,) if foundation else ())


def test_settings_that_the_running_version_did_not_know_are_no_difference() -> None:
    assert restart_settings({}, settings()).changes == ()


def test_a_password_is_in_no_difference() -> None:
    one = settings(redis__url="redis://:secret@h:6379/0")
    other = settings(redis__url="redis://:hidden@i:6379/0")
    (change,) = restart_settings(one, other).changes
    assert change.old == "redis://:***@h:6379/0"
    assert change.new == "redis://:***@i:6379/0"
