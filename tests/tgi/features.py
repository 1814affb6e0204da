"""What tests of single features share: one comparison, and variants of the tiny random model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from orchestrator.embedded.shard.seam import Generation, Request
from tests.tgi.pair import Models, told

START = "<|im_start|>"
SMALL_CACHE = {"IPEX_STAND_IN_FREE_MIB": "64"}
"""Enough for the tiny model."""


async def same(models: Models, asked: Request, adapter: str = "") -> list[Generation]:
    """The steps of the separated pair, which imported, and answered exactly as the stock server."""
    steps = await models.separated(asked, adapter)
    assert steps[0].import_result == "hit"
    assert told(steps) == told(await models.colocated(asked)), asked
    return steps


def with_start_token(tiny: Path, folder: Path) -> Path:
    """`tiny` whose tokenizer begins every text with START, unless told to add no special tokens."""
    shutil.copytree(tiny, folder)
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    start_id = next(token["id"] for token in raw["added_tokens"] if token["content"] == START)
    raw["post_processor"] = _template(start_id)
    path.write_text(json.dumps(raw))
    return folder


def with_ties(tiny: Path, folder: Path) -> Path:
    """`tiny` in which about half of the tokens are exactly as likely as another one, whatever the prompt."""
    shutil.copytree(tiny, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    rows = tensors["lm_head.weight"]
    for first in range(0, rows.shape[0] - 1, 4):
        if rows[first, 0] == rows[first + 1, 0]:  # both may be chosen, or neither
            rows[first + 1] = rows[first]
    save_file(tensors, path, {"format": "pt"})
    return folder


def with_end_tokens(tiny: Path, folder: Path, end_ids: list[int]) -> Path:
    """`tiny` with other end tokens; only TGI's flash classes look there."""
    shutil.copytree(tiny, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": end_ids}))
    return folder


def _template(start_id: int) -> dict[str, Any]:
    start = {"SpecialToken": {"id": START, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [start, text],
        "pair": [start, text, text],
        "special_tokens": {START: {"id": START, "ids": [start_id], "tokens": [START]}},
    }
