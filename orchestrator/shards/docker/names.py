"""What containers, volumes and networks of a deployment are called, and the labels by which they are ours."""

from __future__ import annotations

DEPLOYMENT_LABEL = "tgi-orchestrator.deployment"
"""Everything of ours carries it: `down` removes that and nothing else."""
SHARD_LABEL = "tgi-orchestrator.shard"
SPEC_LABEL = "tgi-orchestrator.spec"
"""The `ShardOrder` as JSON."""
OWNER_LABEL = "tgi-orchestrator.owner"
"""From which state folder it was launched: two of them may use one deployment's name on one engine."""
TASK_LABEL = "tgi-orchestrator.task"
"""Of a container that does one thing and ends: `weights`."""

# What an image says of itself.
TGI_LABEL = "tgi-orchestrator.tgi"
"""TGI's version: the image is TGI with the overlay, and has a sidecar of its own."""
ENGINE_LABEL = "tgi-orchestrator.engine"
"""`embedded`: the image runs the embedded CPU shard."""

CPU_IMAGE = "tgi-orchestrator-cpu"
TGI_IMAGE = "tgi-orchestrator-shard:3.3.7"
"""The default images: the first one's tag is our own version."""

ARENAS = "/arenas"
"""Where the shared tmpfs is mounted in every shard."""
SECRETS = "/run/tgi-orchestrator"
"""Folder of the files with secrets in a container: the deployment's key, the hub's token."""
USER = 10_001
"""User and group inside our images; the arenas belong to that group."""


def container_name(deployment: str, shard: str) -> str:
    return f"tgio-{deployment}-{shard}"


def volume_name(deployment: str) -> str:
    """Of the tmpfs with the arenas."""
    return f"tgio-{deployment}-arenas"


def network_name(deployment: str) -> str:
    return f"tgio-{deployment}"


def labels(deployment: str, owner: str = "") -> dict[str, str]:
    return {DEPLOYMENT_LABEL: deployment, **({OWNER_LABEL: owner} if owner else {})}
