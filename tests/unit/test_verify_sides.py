"""Which sides `verify` compares, and what it says where there is no other one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.commands.sides import _has_pair, mixed_shard
from orchestrator.commands.verify import _reference
from orchestrator.core.order import ShardOrder
from orchestrator.deployment.state import DOCKER, State
from orchestrator.errors import ConfigError
from tgi_patches.contract import Role


def shard(role: str, state: str = "ready") -> dict[str, Any]:
    return {"role": role, "state": state}


@pytest.mark.parametrize(
    ("shards", "pair"),
    [
        ([shard("prefill"), shard("decode")], True),
        ([shard("prefill"), shard("decode"), shard("mixed")], True),
        ([shard("mixed"), shard("mixed")], False),
        ([shard("prefill"), shard("decode", "dead")], False),
        ([], False),
    ],
)
def test_a_pair_is_one_ready_shard_of_each_phase(shards: list[dict[str, Any]], pair: bool) -> None:
    assert _has_pair(shards) is pair


async def test_a_tgi_in_containers_is_not_compared_with_a_process_of_another_engine() -> None:
    order = ShardOrder("blue", "decode-0", Role.DECODE, "org/m", "m", port=3100, sidecar_port=3101)
    state = State(
        "blue", 1, 1, "http://x", "redis://x", "m", "bfloat16", "/arenas", (order,), launcher=DOCKER
    )
    with pytest.raises(ConfigError, match=r"shards\.mixed\.count: 1\), or name a stock TGI with --against"):
        async with mixed_shard(state):
            pass


async def test_the_key_of_the_reference_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-of-the-old-one\n")
    async with _reference("http://tgi", file) as client:
        assert client.headers["authorization"] == "Bearer sk-of-the-old-one"
    async with _reference("http://tgi", None) as client:
        assert "authorization" not in client.headers
    with pytest.raises(ConfigError, match=r"The key file .*none cannot be read"):
        _reference("http://tgi", tmp_path / "none")
