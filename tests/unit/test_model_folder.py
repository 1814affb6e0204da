"""Which folders count as a decoder model, how their content is named, and the dtype for `auto`."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from orchestrator.embedded.folder import check_weights, checked_config, content_revision
from orchestrator.embedded.weights import is_folder, pick_dtype
from orchestrator.errors import ConfigError


def write_model(folder: Path, data: bytes = b"\0" * 8, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    return folder


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "is a BertForMaskedLM: only decoders"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "is a T5For"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "is a Llava"),
        ({"architectures": ["XForCausalLM"], "is_encoder_decoder": True}, "is a XForCausalLM"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": None}, "names no architecture"),
    ],
)
def test_what_is_not_a_decoder_is_refused_by_name(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        checked_config(write_model(tmp_path / "m", **config), "m")


@pytest.mark.parametrize("text", ["", "{", "[1]", '"words"'])
def test_a_config_that_is_no_config_is_one_sentence(tmp_path: Path, text: str) -> None:
    (write_model(tmp_path / "m") / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        checked_config(tmp_path / "m", "m")
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_or_with_missing_parts_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    check_weights(folder)
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    (folder / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ConfigError, match=r"lacks 1 weight files, such as model-00002-of-00002\.safetensors"):
        check_weights(folder)
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match="no safetensors file"):
        check_weights(folder)


def test_equal_content_in_two_folders_has_one_revision(tmp_path: Path) -> None:
    data = bytes(range(256)) * 64
    one, two = write_model(tmp_path / "one", data), write_model(tmp_path / "two", data)
    assert content_revision(one) == content_revision(two)


@pytest.mark.parametrize("at", [0, 5_000_000, -1])
def test_a_changed_weight_block_changes_the_revision(tmp_path: Path, at: int) -> None:
    # 16 samples of 64 KiB over 10 MB: the first begins at 0, the last one ends at the end, and
    # sample 7 begins at 7/15 of (10 MB - 64 KiB) = 4.636 MB, sample 8 at 5.298 MB: 5.0 MB lies between.
    data = bytearray(10_000_000)
    before = content_revision(write_model(tmp_path / "m", bytes(data)))
    if at > 0:
        data[at - 700_000 : at + 700_000] = b"\1" * 1_400_000
    else:
        data[at] = 1
    assert content_revision(write_model(tmp_path / "m", bytes(data))) != before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "tokenizer.model"])
def test_a_changed_config_or_tokenizer_file_changes_the_revision(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "m")
    before = content_revision(folder)
    (folder / name).write_text('{"changed": true}')
    assert content_revision(folder) != before


def test_a_file_that_claims_a_huge_header_is_read_to_its_end_only(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"\xff" * 8 + b"data")
    assert len(content_revision(folder)) == 16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16\n", "bfloat16"),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", "bfloat16"),
        ("Features\t: fp asimd bf16 i8mm\n", "bfloat16"),
        ("flags\t\t: fpu avx2 avx512f\n", "float32"),
        ("model name\t: an avx512_bf16 in a name counts for nothing\nflags\t\t: fpu\n", "float32"),
        ("", "float32"),
    ],
)
def test_auto_is_bfloat16_only_where_the_cpu_has_it(tmp_path: Path, text: str, expected: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert pick_dtype("auto", cpuinfo) == expected


def test_a_dtype_that_was_asked_for_is_taken_as_it_is(tmp_path: Path) -> None:
    assert pick_dtype("float32", tmp_path / "none") == "float32"
    assert pick_dtype("bfloat16", tmp_path / "none") == "bfloat16"
    assert pick_dtype("auto", tmp_path / "none") == "float32"
    assert pick_dtype("auto", tmp_path / "none", gpu=True) == "bfloat16"


def test_a_name_is_a_folder_when_it_looks_like_a_path_or_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert [is_folder(text) for text in ("/x", "./x", "../x", "~/x", "org/name")] == [True] * 5
    assert [is_folder(text) for text in ("org/other", "gpt2")] == [False] * 2
