"""From settings and a host to orders for containers, and what is refused before anything is launched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import Loaded, load_settings
from orchestrator.core.gpu_claims import Claim
from orchestrator.core.kv_bytes import shape_of
from orchestrator.core.order import ShardOrder
from orchestrator.core.placement import GpuClaim
from orchestrator.deployment.containers import Host, Model, cpu_image, in_containers, placed_beside
from orchestrator.deployment.launching import sidecar_urls
from orchestrator.deployment.ledger import no_room
from orchestrator.deployment.plan import Plan, make_plan
from orchestrator.embedded.weights import ResolvedModel
from orchestrator.errors import ConfigError
from orchestrator.shards.docker.container import Bind
from orchestrator.shards.docker.engine import EngineFacts
from orchestrator.shards.docker.own import OwnContainer
from orchestrator.topology.file import read_topology
from tgi_patches.contract import Role

GIB = 2**30
TGI = "tgi-orchestrator-shard:3.3.7"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131_072,
}
FOLDER = Path("/srv/models/llama")
ENGINE = EngineFacts("28.2.2", (1, 50), "Engine", False, ("runc",), 256 * GIB, 64, "/var/lib/docker", True)
TOPOLOGIES = Path(__file__).with_name("topologies")


def loaded(**flags: Any) -> Loaded:
    return load_settings(None, {"launcher": "docker", **flags}, {})


def planned(settings: Loaded, host: Host, *, gpu_gib: float = 20) -> Plan:
    plan = make_plan(settings, ResolvedModel(FOLDER, "llama", "r1", ""), LLAMA, "bfloat16", range(4))
    model = Model(shape_of(LLAMA), 16 * GIB, lambda tp: int(gpu_gib * GIB / tp), FOLDER)
    return in_containers(plan, settings.settings, host, model)


def on_cpu(**more: Any) -> Host:
    return Host(ENGINE, {cpu_image(): ""}, **more)


def on_gpus(name: str, **more: Any) -> Host:
    return Host(ENGINE, {TGI: "3.3.7"}, topology=read_topology(TOPOLOGIES / name), **more)


def orders(plan: Plan) -> dict[str, ShardOrder]:
    return {spec.shard: spec for spec in plan.specs if isinstance(spec, ShardOrder)}


def test_embedded_shards_get_ports_cores_and_a_limit_that_has_their_arena_in_it() -> None:
    plan = planned(loaded(), on_cpu())
    made = orders(plan)
    assert list(made) == ["prefill-0", "decode-0"]
    assert [order.image for order in made.values()] == [cpu_image()] * 2
    assert [(order.host, order.port, order.sidecar_port) for order in made.values()] == [
        ("0.0.0.0", 3100, 0),
        ("0.0.0.0", 3110, 0),
    ]
    assert [order.cpus for order in made.values()] == [(0,), (1,)]
    # 3 x 16 GiB of weights, 1.5 GiB, and 4 prompts of 4,096 tokens with 128 KiB of KV each.
    own = 48 * GIB + 1536 * 2**20 + 4 * 4096 * 131_072
    prefill, decode = made["prefill-0"], made["decode-0"]
    assert decode.memory_bytes == own
    assert prefill.memory_bytes == own + prefill.arena_bytes + prefill.pinned_bytes
    assert prefill.arena_bytes > 0
    assert {str(order.arena_dir) for order in made.values()} == {"/arenas"}
    assert plan.containers is not None
    assert plan.containers.network == "tgio-default"
    assert plan.containers.binds == (Bind("/srv/models/llama", "/srv/models/llama"),)


def test_shards_join_the_network_of_an_orchestrator_in_a_container_and_get_its_mounts() -> None:
    own = OwnContainer("o", ("bridge", "serving"), (Bind("models", "/srv/models"),))
    containers = planned(loaded(), on_cpu(own=own)).containers
    assert containers is not None
    assert containers.network == "serving"
    assert containers.binds == (Bind("models", "/srv/models"),)
    with pytest.raises(ConfigError, match="in the orchestrator's own container o only"):
        planned(loaded(), on_cpu(own=OwnContainer("o", (), ())))


def test_on_the_hosts_network_each_shard_listens_on_loopback_at_free_ports() -> None:
    firsts = iter((7000, 7020))
    plan = planned(loaded(**{"docker.network": "host"}), on_cpu(free_ports=lambda count: next(firsts)))
    assert [(order.host, order.port) for order in orders(plan).values()] == [
        ("127.0.0.1", 7000),
        ("127.0.0.1", 7020),
    ]


def test_tgi_on_gpus_gets_a_sidecar_gpus_by_uuid_and_shared_memory_for_its_ranks() -> None:
    plan = planned(loaded(**{"shards.prefill.tp": 2}), on_gpus("a100-sxm4-80gb-x8.yaml"))
    made = orders(plan)
    prefill, decode = made["prefill-0"], made["decode-0"]
    assert (prefill.image, prefill.port, prefill.sidecar_port) == (TGI, 3100, 3101)
    assert len(set(prefill.gpus)) == 2
    assert len(decode.gpus) == 1
    assert not set(prefill.gpus) & set(decode.gpus)
    assert all(gpu.startswith("GPU-") for gpu in (*prefill.gpus, *decode.gpus))
    assert (prefill.shm_bytes, decode.shm_bytes) == (GIB, 0)
    assert prefill.memory_bytes == 0, "how much of the host's memory TGI needs is not known"


def test_a_gpu_that_a_container_of_somebody_else_has_is_not_given_away() -> None:
    topology = read_topology(TOPOLOGIES / "a10-pcie-x4.yaml")
    held = tuple(GpuClaim(gpu.uuid, "trainer", 0, 0.0) for gpu in topology.gpus[:2])
    host = Host(ENGINE, {TGI: "3.3.7"}, topology=topology, claims=held)
    made = orders(planned(loaded(), host))
    assert {gpu for order in made.values() for gpu in order.gpus} == {gpu.uuid for gpu in topology.gpus[2:]}
    with pytest.raises(ConfigError, match=r"3 are wanted.*trainer"):
        planned(loaded(**{"shards.decode.count": 2}), host)


def test_one_gpu_is_served_by_one_mixed_shard_and_the_plan_says_why() -> None:
    plan = planned(loaded(), on_gpus("h200-x1.yaml"))
    (order,) = orders(plan).values()
    assert (order.shard, order.role, order.image) == ("mixed-0", Role.MIXED, TGI)
    assert (order.arena_bytes, order.pinned_bytes, order.tensor_parallel) == (0, 0, 1)
    assert plan.containers is not None
    assert plan.containers.notes[0].startswith("This host has one GPU")


@pytest.mark.parametrize(
    ("flags", "gpu_gib", "told"),
    [
        ({"shards.prefill.gpus": [["GPU-nowhere"]]}, 20, "There is no GPU 'GPU-nowhere'"),
        ({}, 200, "200"),
    ],
)
def test_what_no_gpu_of_the_host_can_is_refused(flags: dict[str, Any], gpu_gib: float, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(loaded(**flags), on_gpus("a10-pcie-x4.yaml"), gpu_gib=gpu_gib)
    assert told in str(refused.value)


def test_gpus_that_are_named_where_none_can_be_seen_are_refused() -> None:
    with pytest.raises(ConfigError, match="names GPU-1, and no GPU can be seen from here"):
        planned(loaded(**{"shards.prefill.gpus": [["GPU-1"]]}), on_cpu())


def test_limits_that_the_host_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="lower shards"):
        planned(loaded(**{"shards.decode.memory_bytes": 300 * GIB}), on_cpu())


def test_a_shard_more_needs_its_gpu_and_memory_beside_what_runs() -> None:
    order = ShardOrder("d", "s", Role.DECODE, "m", "m", gpus=("GPU-1",), memory_bytes=4 * GIB)
    held = Claim("GPU-1", "tgio-d-decode-0", "d")
    assert no_room(order, [held], [], 8 * GIB, 0) == "GPU-1 is taken by tgio-d-decode-0 of deployment d"
    assert no_room(order, [Claim("GPU-2", "other")], [order], 8 * GIB, 0) == ""
    larger = replace(order, memory_bytes=5 * GIB)
    assert no_room(order, [], [larger], 8 * GIB, 0) == "the host has no memory for one shard more"
    ring = replace(order, memory_bytes=0, arena_bytes=2 * GIB)
    assert no_room(ring, [], [ring], 8 * GIB, 2 * GIB) == ""
    assert no_room(ring, [], [ring, ring], 8 * GIB, 2 * GIB).startswith("the arenas' volume has no room")


def test_a_new_shard_goes_to_gpus_that_nobody_has_or_stays_where_it_was_planned() -> None:
    topology = read_topology(TOPOLOGIES / "a10-pcie-x4.yaml")
    first, second, third, fourth = (gpu.uuid for gpu in topology.gpus)
    order = ShardOrder("d", "decode-1", Role.DECODE, "m", "m", gpus=(second,))
    held = [GpuClaim(gpu, "ours", 0, 0.0) for gpu in (first, second, third)]
    assert placed_beside(order, topology, held).gpus == (fourth,)
    assert placed_beside(order, topology, [*held, GpuClaim(fourth, "other", 0, 0.0)]).gpus == (second,)
    named = replace(order, gpus_named=True)
    assert placed_beside(named, topology, held) == named


def test_a_sidecar_beside_a_given_url_is_at_its_port_of_the_same_host() -> None:
    settings = load_settings(
        None,
        {
            "shards.prefill.urls": ["http://10.0.0.1:3001", "http://[::1]:3002"],
            "shards.prefill.sidecar_port": 3101,
            "shards.decode.urls": ["http://10.0.0.2:3001"],
        },
        {},
    ).settings
    urls = {
        "prefill-0": "http://10.0.0.1:3001",
        "prefill-1": "http://[::1]:3002",
        "decode-0": "http://10.0.0.2:3001",
    }
    assert sidecar_urls(settings, urls) == {
        "prefill-0": "http://10.0.0.1:3101",
        "prefill-1": "http://[::1]:3101",
    }
