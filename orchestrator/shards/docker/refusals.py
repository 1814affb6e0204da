"""What the engine says when it cannot start a container, in words that say what to do.  Pure."""

from __future__ import annotations

import re

_SENTENCES = {
    r"could not select device driver": "needs a GPU and this engine gives none to containers: install "
    "NVIDIA's container toolkit, run `nvidia-ctk runtime configure --runtime=docker` and restart Docker.",
    r"nvidia-container-cli: (?:\w+ error: )?(?P<what>[^\s:]+): unknown device": "is to have the GPU {what}, "
    "which this host does not have: `nvidia-smi -L` lists those that it has.",
    r"nvidia-container-cli: (?P<what>.*)": "was given no GPU by NVIDIA's container toolkit ({what}): try "
    "`nvidia-smi` on the host.",
    r"unresolvable CDI devices (?P<what>.*)": "is to have {what} by CDI, which this host does not have: "
    "`nvidia-ctk cdi list` lists those that it has.",
    r"Requested CPUs are not available - (?P<what>.*)": "is to have CPU cores that this host does not have "
    "({what}).",
    r"(?i)minimum memory limit allowed is (?P<what>\w+)": "has a memory limit below the {what} that Docker "
    "allows: raise memory_bytes.",
    r"bind source path does not exist: (?P<what>/tmp/nvidia-mps)": "is to share a GPU and NVIDIA's MPS does "
    "not run ({what} is missing): `nvidia-cuda-mps-control -d` starts it.",
    r"bind source path does not exist: (?P<what>.*)": "is to get the folder {what}, which the engine's host "
    "does not have.",
    r'exec: \\?"(?P<what>[^"\\]+)\\?":.*(?:not found|no such file)': "cannot start: its image has no {what}.",
    r"(?i)network (?P<what>\S+) not found": "is to be in the network {what}, which this engine does not "
    "have: create it, or leave docker.network out.",
}
"""The first pattern that is found counts; `what` is quoted."""


def sentence(who: str, told: str) -> str:
    """For what will fail again at every try; empty for everything else."""
    for pattern, words in _SENTENCES.items():
        if found := re.search(pattern, told, re.DOTALL):
            parts = {name: value.strip().rstrip(".") for name, value in found.groupdict().items()}
            return f"{who} {words.format(**parts)}"
    return ""
