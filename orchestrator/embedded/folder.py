"""A folder that holds a Hugging Face model: what must be in it, and a name for its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError

SAMPLE_BYTES = 64 * 1024
SAMPLES = 16
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def checked_config(folder: Path, name: str) -> dict[str, Any]:
    """config.json of a decoder; ConfigError for everything else."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise ConfigError(f"The model folder {folder} does not exist.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"The folder {folder} has no config.json, so it is no Hugging Face model."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"The file {path} cannot be read: {error}.") from None
    names = config.get("architectures") if isinstance(config, dict) else None
    if not names:
        raise ConfigError(f"The file {path} names no architecture, so it is not known to be a decoder.")
    if config.get("is_encoder_decoder") or not all(str(n).endswith("ForCausalLM") for n in names):
        raise ConfigError(
            f"The model {name} is a {names[0]}: only decoders (...ForCausalLM) can be split into phases."
        )
    return dict(config)


def check_weights(folder: Path) -> None:
    """ConfigError unless every safetensors file that belongs to the model is there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            raise ConfigError(f"The file {index} cannot be read.") from None
        missing = sorted(file for file in files if not (folder / file).is_file())
        if missing:
            raise ConfigError(f"The folder {folder} lacks {len(missing)} weight files, such as {missing[0]}.")
    elif not any(folder.glob("*.safetensors")):
        raise ConfigError(f"The folder {folder} has no safetensors file; other formats are not loaded.")


def is_complete(folder: Path, name: str) -> bool:
    """True for a decoder whose weights are all there."""
    try:
        checked_config(folder, name)
        check_weights(folder)
    except ConfigError:
        return False
    return True


def content_revision(folder: Path) -> str:
    """16 hex digits over config, tokenizer, and of each safetensors file the header and sampled blocks.

    Reads at most about 1 MiB of each weight file, so that a large model costs milliseconds.
    """
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _SMALL_FILES for path in folder.glob(pattern)}):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        for block in _sampled(path):
            digest.update(block)
    return digest.hexdigest()[:16]


def _sampled(path: Path) -> Iterator[bytes]:
    """The header of a safetensors file and blocks spread evenly over its data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = min(int.from_bytes(prefix, "little"), size)
        yield prefix + file.read(header_bytes)
        first = 8 + header_bytes
        last = max(first, size - SAMPLE_BYTES)
        for sample in range(SAMPLES):
            file.seek(first + (last - first) * sample // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)
