"""Launch orders from settings, a model and a machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import load_settings
from orchestrator.deployment.plan import Plan, WantedShard, check_room, make_plan, shard_plan
from orchestrator.embedded.weights import ResolvedModel
from orchestrator.errors import ConfigError
from tgi_patches.contract import Role

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 8192,
}
MODEL = ResolvedModel(Path("/m"), "tiny", "r1", "float32")
CORES = (3, 5)


def plan_of(positions: int = 8192, **flags: Any) -> Plan:
    named = {key.replace("__", "."): value for key, value in flags.items()}
    config = {**CONFIG, "max_position_embeddings": positions}
    return make_plan(load_settings(None, named, {}), MODEL, config, "float32", CORES)


def test_one_prefill_and_one_decode_shard_by_default_on_a_core_each() -> None:
    specs = plan_of().specs
    assert [(spec.shard, spec.role, spec.cpus) for spec in specs] == [
        ("prefill-0", Role.PREFILL, (3,)),
        ("decode-0", Role.DECODE, (5,)),
    ]
    assert {(spec.model, spec.model_name, spec.revision) for spec in specs} == {("/m", "tiny", "r1")}


def test_cores_are_given_in_turn_and_shared_when_there_are_more_shards() -> None:
    plan = plan_of(shards__prefill__count=2, shards__decode__count=2, shards__mixed__count=1)
    names = [(spec.shard, spec.cpus) for spec in plan.specs]
    assert names == [
        ("prefill-0", (3,)),
        ("prefill-1", (5,)),
        ("decode-0", (3,)),
        ("decode-1", (5,)),
        ("mixed-0", (3,)),
    ]


def test_a_shard_of_several_ranks_gets_a_core_for_each_while_there_are_so_many() -> None:
    plan = plan_of(shards__prefill__tp=2, shards__mixed__count=1)
    assert [(spec.shard, spec.tensor_parallel, spec.cpus) for spec in plan.specs] == [
        ("prefill-0", 2, (3, 5)),
        ("decode-0", 1, (3,)),
        ("mixed-0", 1, (5,)),
    ]
    alone = plan_of(shards__decode__tp=2, shards__decode__cpus=[[5]])
    assert [spec.cpus for spec in alone.specs] == [(3,), (5,)]


@pytest.mark.parametrize(
    ("role", "ranks", "dtype", "sentence"),
    [
        ("decode", 4, "float32", r"shards\.decode\.tp is 4, but the model's 2 KV heads cannot be split"),
        ("prefill", 3, "bfloat16", r"shards\.prefill\.tp is 3, but the model's 2 KV heads cannot be split"),
        ("mixed", 2, "int8", r"shards\.mixed\.tp is 2, but int8 weights cannot be split"),
    ],
)
def test_what_cannot_be_split_over_ranks_is_refused(role: str, ranks: int, dtype: str, sentence: str) -> None:
    loaded = load_settings(None, {f"shards.{role}.tp": ranks}, {})
    with pytest.raises(ConfigError, match=sentence):
        make_plan(loaded, MODEL, CONFIG, dtype, CORES)


def test_named_cores_are_used_and_must_be_ours() -> None:
    plan = plan_of(shards__prefill__cpus=[[3, 5]])
    assert [spec.cpus for spec in plan.specs] == [(3, 5), (3,)]
    with pytest.raises(ConfigError, match=r"shards\.decode\.cpus names core 9"):
        plan_of(shards__decode__cpus=[[9]])


def test_only_prefill_shards_own_a_ring_and_it_takes_four_of_the_longest_prompt() -> None:
    token_bytes = 2 * 2 * 2 * 16 * 4
    rings = {spec.role: spec.arena_bytes for spec in plan_of().specs}
    assert rings[Role.DECODE] == 0
    assert 4 * 4095 * token_bytes <= rings[Role.PREFILL] <= 4 * 4095 * token_bytes * 1.02 + 2 * 2**20


def test_a_ring_size_in_the_settings_is_taken_as_it_is() -> None:
    plan = plan_of(arena__bytes=123_456, shards__prefill__count=2)
    assert [spec.arena_bytes for spec in plan.specs] == [123_456, 123_456, 0]
    assert plan.arena_bytes == 246_912


@pytest.mark.parametrize(
    ("flags", "pinned"),
    [
        ({}, 0),
        ({"shards__decode__count": 2}, 100_000),
        ({"routing__hot_prompts": "on"}, 100_000),
        ({"routing__hot_prompts": "off", "shards__decode__count": 2}, 0),
        ({"routing__hot_prompts": "off", "arena__pinned_bytes": 5000}, 0),
        ({"routing__hot_prompts": "on", "arena__pinned_bytes": 5000}, 5000),
        ({"arena__pinned_bytes": 5000}, 0),
    ],
)
def test_exporting_shards_pin_where_prompts_may_become_hot(flags: dict[str, Any], pinned: int) -> None:
    """An eighth of the ring, unless the settings say how much."""
    plan = plan_of(arena__bytes=800_000, shards__mixed__count=1, **flags)
    assert {spec.role: spec.pinned_bytes for spec in plan.specs} == {
        Role.PREFILL: pinned,
        Role.DECODE: 0,
        Role.MIXED: 0,
    }
    assert plan.arena_bytes == 800_000 + pinned


def test_a_shard_alone_pins_unless_it_is_told_that_no_prompt_is_hot() -> None:
    """How many decode shards there are, its own configuration need not tell."""
    assert alone(Role.PREFILL, arena__bytes=800_000).specs[0].pinned_bytes == 100_000
    off = alone(Role.PREFILL, arena__bytes=800_000, routing__hot_prompts="off")
    assert off.specs[0].pinned_bytes == 0
    assert alone(Role.DECODE).specs[0].pinned_bytes == 0


def test_default_limits_shrink_to_the_model() -> None:
    limits = {(spec.max_input_tokens, spec.max_total_tokens) for spec in plan_of(positions=512).specs}
    assert limits == {(511, 512)}
    assert (plan_of().max_input_tokens, plan_of().max_total_tokens) == (4095, 4096)


def test_limits_that_the_user_wrote_do_not_shrink_silently() -> None:
    with pytest.raises(ConfigError, match=r"max_total_tokens is 9000, but the model ends at 8192"):
        plan_of(limits__max_total_tokens=9000)
    with pytest.raises(ConfigError, match=r"max_input_tokens \(600\) must be below max_total_tokens \(512\)"):
        plan_of(positions=512, limits__max_input_tokens=600)


def test_prefill_budgets_hold_a_whole_prompt_and_decode_budgets_are_low() -> None:
    budgets = {spec.role: spec.max_batch_prefill_tokens for spec in plan_of().specs}
    assert budgets == {Role.PREFILL: 4096, Role.DECODE: 1024}


def test_rings_that_do_not_fit_are_refused_with_both_sizes_and_a_way_out() -> None:
    check_room(100 * 2**20, 100 * 2**20, Path("/dev/shm"))
    with pytest.raises(ConfigError, match=r"need 700 MiB and /dev/shm has 64 MiB free: lower limits"):
        check_room(700 * 2**20, 64 * 2**20, Path("/dev/shm"))


# --- other hosts --------------------------------------------------------------------------------

AWAY = ["http://10.0.0.1:3001", "http://10.0.0.2:3001/"]


def test_shards_at_urls_are_named_like_others_and_not_launched() -> None:
    plan = plan_of(shards__prefill__urls=AWAY)
    assert [spec.shard for spec in plan.specs] == ["prefill-0", "prefill-1", "decode-0"]
    assert plan.urls == {"prefill-0": "http://10.0.0.1:3001", "prefill-1": "http://10.0.0.2:3001"}
    assert [(spec.shard, spec.cpus) for spec in plan.launched] == [("decode-0", (3,))]


def test_a_decode_shard_has_room_for_copies_only_where_prefill_is_elsewhere() -> None:
    assert [spec.pulled_bytes for spec in plan_of().specs] == [0, 0]
    ring = plan_of().specs[0].arena_bytes
    away = plan_of(shards__prefill__urls=AWAY)
    assert [(spec.arena_bytes, spec.pulled_bytes) for spec in away.specs] == [(0, 0), (0, 0), (0, ring)]
    assert away.arena_bytes == ring
    chosen = plan_of(shards__prefill__urls=AWAY, arena__pulled_bytes=5_000_000)
    assert chosen.arena_bytes == 5_000_000


def test_only_prefill_shards_offer_records_and_each_at_a_port_of_its_own() -> None:
    plan = plan_of(shards__prefill__count=2, arena__pull_listen="10.0.0.1:3101")
    assert [spec.pull_listen for spec in plan.specs] == ["10.0.0.1:3101", "10.0.0.1:3102", ""]
    any_port = plan_of(shards__prefill__count=2, arena__pull_listen="[::1]:0")
    assert [spec.pull_listen for spec in any_port.specs] == ["[::1]:0", "[::1]:0", ""]


def alone(role: Role, cpus: tuple[int, ...] = (), **flags: Any) -> Plan:
    named = {key.replace("__", "."): value for key, value in flags.items()}
    wanted = WantedShard(role, f"{role}-7", "10.0.0.1", 3001, cpus)
    return shard_plan(load_settings(None, named, {}), MODEL, CONFIG, "float32", CORES, wanted)


def test_a_shard_alone_is_launched_as_up_would_at_the_address_it_is_given() -> None:
    (spec,) = alone(Role.PREFILL, arena__pull_listen="10.0.0.1:3101").launched
    (like, _) = plan_of(arena__pull_listen="10.0.0.1:3101", routing__hot_prompts="on").specs
    assert (spec.shard, spec.host, spec.port) == ("prefill-7", "10.0.0.1", 3001)
    assert spec == replace(like, shard="prefill-7", host="10.0.0.1", port=3001)


def test_one_configuration_serves_both_hosts() -> None:
    """The file that tells B where A's shard is must not keep A from starting it."""
    (spec,) = alone(Role.PREFILL, shards__prefill__urls=AWAY, arena__pull_listen="10.0.0.1:3101").launched
    assert spec.arena_bytes > 0
    assert spec.pull_listen == "10.0.0.1:3101"


def test_a_decode_shard_alone_fetches_and_takes_the_cores_it_is_given() -> None:
    (spec,) = alone(Role.DECODE, cpus=(3, 5)).launched
    assert (spec.cpus, spec.arena_bytes) == ((3, 5), 0)
    assert spec.pulled_bytes == plan_of().specs[0].arena_bytes
    with pytest.raises(ConfigError, match="--cpus names core 4"):
        alone(Role.DECODE, cpus=(4,))
