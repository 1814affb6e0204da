"""What both sides read the same way: tags, protocol, fingerprint, spec and messages."""

from __future__ import annotations

import dataclasses
import json
import string
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_patches.contract import (
    OVERLAY_VERSION,
    PROTOCOL_VERSION,
    SPEC_VARIABLE,
    BridgeMiss,
    ContractError,
    Fingerprint,
    GetTag,
    Limits,
    MissReason,
    PutTag,
    Role,
    ShardSpec,
    StatusReply,
    WaitReply,
    carries_tag,
    check_protocol,
    checked_part,
    new_epoch,
    new_handle,
    parse_tag,
)

HANDLE = "00112233445566778899aabbccddeeff"
FINGERPRINT = Fingerprint("smol", "r1", "tok", "float32", "float32", layers=30, kv_heads=3, head_dim=64)
SPEC = ShardSpec("dep", "p0", Role.PREFILL, "/models/smol", "smol", cpus=(0, 1), arena_bytes=2**28)
LIMITS = Limits(max_input_tokens=10, max_total_tokens=20)

handles = st.text("0123456789abcdef", min_size=32, max_size=32)
parts = st.text(string.ascii_letters + string.digits + "_.-", min_size=1, max_size=64).filter(
    lambda part: part not in (".", "..")
)
adapters = st.text(max_size=60)
adapters_with_marks = st.lists(st.sampled_from(["a", ":", "|", "|k", "kv", ".", "é", "put"]), max_size=8).map(
    "".join
)


# --- the handle as it travels ---------------------------------------------------------------------


@given(handles, adapters | adapters_with_marks, st.booleans())
def test_a_put_tag_is_read_as_it_was_written(handle: str, adapter: str, pinned: bool) -> None:
    tag = PutTag(handle, adapter, pinned)
    assert parse_tag(str(tag)) == tag
    assert carries_tag(str(tag))


@given(
    handles,
    parts,
    st.integers(0, 2**64 - 1),
    st.none() | st.integers(0, 2**32 - 1),
    adapters | adapters_with_marks,
)
def test_a_get_tag_is_read_as_it_was_written(
    handle: str, shard: str, epoch: int, first: int | None, adapter: str
) -> None:
    tag = GetTag(handle, shard, epoch, first, adapter)
    assert parse_tag(str(tag)) == tag


def test_tags_travel_in_this_form() -> None:
    assert str(PutTag(HANDLE)) == f"|kv1:put:{HANDLE}"
    assert str(PutTag(HANDLE, "lora", pinned=True)) == f"lora|kv1:pin:{HANDLE}"
    assert str(PutTag(HANDLE, "my:lora|v2")) == f"my:lora|v2|kv1:put:{HANDLE}"
    assert str(GetTag(HANDLE, "p.0", 17, 5, "lora")) == f"lora|kv1:get:p.0.17:{HANDLE}:5"
    assert str(GetTag(HANDLE, "p-0", 17)) == f"|kv1:get:p-0.17:{HANDLE}:-"


@pytest.mark.parametrize("value", [None, "", "lora", "kv1:put:x", "a|b:c", "HuggingFaceTB/SmolLM2-135M"])
def test_a_plain_name_carries_no_tag(value: str | None) -> None:
    assert parse_tag(value) is None
    assert not carries_tag(value or "")


@pytest.mark.parametrize(
    "value",
    [
        "|kv",
        "|kv:put:" + HANDLE,
        "|kvx:put:" + HANDLE,
        "|kv-1:put:" + HANDLE,
        "|kv1",
        "|kv1:",
        "|kv1:put",
        "|kv1:pin",
        "|kv1:pin:" + HANDLE[:-1],
        "|kv1:pin:" + HANDLE + ":5",
        "|kv1:pinned:" + HANDLE,
        "|kv1:put:",
        "|kv1:put:" + HANDLE[:-1],
        "|kv1:put:" + HANDLE + "0",
        "|kv1:put:" + HANDLE.upper(),
        "|kv1:put:" + HANDLE + "\n",
        "|kv1:put:" + HANDLE + ":5",
        "|kv1:pop:" + HANDLE,
        "|kv1:get:" + HANDLE,
        f"|kv1:get:p:{HANDLE}:5",
        f"|kv1:get:p.:{HANDLE}:5",
        f"|kv1:get:.7:{HANDLE}:5",
        f"|kv1:get:p.7x:{HANDLE}:5",
        f"|kv1:get:p.-7:{HANDLE}:5",
        f"|kv1:get:p/q.7:{HANDLE}:5",
        f"|kv1:get:...7:{HANDLE}:5",
        f"|kv1:get:{'p' * 65}.7:{HANDLE}:5",
        f"|kv1:get:p.7:{HANDLE}:",
        f"|kv1:get:p.7:{HANDLE}:-5",
        f"|kv1:get:p.7:{HANDLE}:5:6",
        f"|kv1:get:p.7:{HANDLE[:-1]}:5",
    ],
)
def test_a_broken_tag_is_an_error_and_never_a_plain_name(value: str) -> None:
    with pytest.raises(ContractError):
        parse_tag(value)
    with pytest.raises(ContractError):
        parse_tag("lora" + value)


@given(adapters | adapters_with_marks, st.text("kv0123456789:|putge.-abcdef", max_size=60))
def test_reading_a_tag_gives_a_tag_or_a_contract_error(adapter: str, rest: str) -> None:
    try:
        tag = parse_tag(f"{adapter}|kv{rest}")
    except ContractError:
        return
    assert tag is not None
    assert parse_tag(str(tag)) == tag


def test_handles_are_new_and_well_formed() -> None:
    made = {new_handle() for _ in range(1000)}
    assert len(made) == 1000
    assert all(parse_tag(str(PutTag(handle))) == PutTag(handle) for handle in made)


def test_epochs_grow() -> None:
    first, second = new_epoch(), new_epoch()
    assert 2**60 < first <= second < 2**64


@pytest.mark.parametrize("value", ["", ".", "..", "a b", "a/b", "ä", "a:b", "a\n", "x" * 65])
def test_names_that_would_leave_their_place_are_refused(value: str) -> None:
    with pytest.raises(ContractError, match="The shard name"):
        checked_part(value, "shard name")


# --- protocol and fingerprint ---------------------------------------------------------------------


def test_only_one_version_apart_is_read() -> None:
    check_protocol(PROTOCOL_VERSION)
    check_protocol(PROTOCOL_VERSION - 1)
    for peer in (PROTOCOL_VERSION + 1, PROTOCOL_VERSION - 2):
        with pytest.raises(ContractError, match=f"speaks protocol {peer} and this side {PROTOCOL_VERSION}"):
            check_protocol(peer)


@pytest.mark.parametrize("version", [PROTOCOL_VERSION + 1, 99])
def test_tags_and_messages_of_another_protocol_are_refused(version: int) -> None:
    with pytest.raises(ContractError, match="upgrade"):
        parse_tag(f"|kv{version}:put:{HANDLE}")
    with pytest.raises(ContractError, match="upgrade"):
        WaitReply.from_dict({"protocol": version, "handle": HANDLE, "found": False})


CONTENT = {
    "model": "other",
    "revision": "r2",
    "tokenizer": "t2",
    "dtype": "bfloat16",
    "kv_dtype": "fp8",
    "layers": 31,
    "kv_heads": 4,
    "head_dim": 128,
    "quantization": "int8",
    "rope": "linear:2",
    "adapters": "lora",
    "overlay": OVERLAY_VERSION + "x",
}
GEOMETRY = {"attention": "flashinfer", "block_size": 256, "tensor_parallel": 2}


def test_every_field_of_the_fingerprint_is_content_or_geometry() -> None:
    assert {f.name for f in dataclasses.fields(Fingerprint)} == CONTENT.keys() | GEOMETRY.keys()


@pytest.mark.parametrize(("name", "value"), CONTENT.items())
def test_content_must_be_equal_and_the_sentence_names_the_difference(name: str, value: object) -> None:
    other = dataclasses.replace(FINGERPRINT, **{name: value})  # type: ignore[arg-type]
    mine = getattr(FINGERPRINT, name)
    assert FINGERPRINT.difference(other) == f"The shards differ in {name}: {mine!r} against {value!r}."
    assert FINGERPRINT.digest() != other.digest()


@pytest.mark.parametrize(("name", "value"), GEOMETRY.items())
def test_geometry_may_differ(name: str, value: object) -> None:
    other = dataclasses.replace(FINGERPRINT, **{name: value})  # type: ignore[arg-type]
    assert FINGERPRINT.difference(other) is None
    assert FINGERPRINT.digest() == other.digest()


def test_a_digest_is_the_same_in_every_process() -> None:
    """Worked out with another program: sha256 over the content as sorted JSON."""
    text = (
        '{"adapters": "", "dtype": "float32", "head_dim": 64, "kv_dtype": "float32", "kv_heads": 3, '
        '"layers": 30, "model": "smol", "overlay": "4", "quantization": "", "revision": "r1", '
        '"rope": "", "tokenizer": "tok"}'
    )
    line = subprocess.run(["sha256sum"], input=text, capture_output=True, text=True, check=True, timeout=10)
    assert FINGERPRINT.digest() == line.stdout[:16]


# --- spec and messages ----------------------------------------------------------------------------


specs = st.builds(
    ShardSpec,
    deployment=parts,
    shard=parts,
    role=st.sampled_from(Role),
    model=st.text(),
    model_name=st.text(),
    revision=st.text(),
    port=st.integers(0, 65535),
    cpus=st.lists(st.integers(0, 255)).map(tuple),
    arena_dir=st.text(),
    arena_bytes=st.integers(0, 2**50),
    record_ttl_s=st.floats(0, 1e9),
)


@given(specs)
def test_a_spec_survives_the_environment(spec: ShardSpec) -> None:
    env = {"PATH": "/bin", **spec.to_env()}
    assert set(spec.to_env()) == {SPEC_VARIABLE}
    assert ShardSpec.from_env(env) == spec


def test_a_spec_from_a_newer_orchestrator_is_read() -> None:
    raw = {**SPEC.to_dict(), "something_new": 1}
    assert ShardSpec.from_env({SPEC_VARIABLE: json.dumps(raw)}) == SPEC


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({}, f"The variable {SPEC_VARIABLE} is not set"),
        ({SPEC_VARIABLE: "{"}, "is not JSON"),
        ({SPEC_VARIABLE: '{"deployment": "d"}'}, "ShardSpec message is not complete"),
        ({SPEC_VARIABLE: json.dumps({**SPEC.to_dict(), "role": "chef"})}, "chef"),
        ({SPEC_VARIABLE: json.dumps({**SPEC.to_dict(), "shard": "../x"})}, "The shard name"),
        ({SPEC_VARIABLE: json.dumps({**SPEC.to_dict(), "max_input_tokens": 4096})}, "must be below"),
        ({SPEC_VARIABLE: json.dumps({**SPEC.to_dict(), "max_input_tokens": 0})}, "must be below"),
    ],
)
def test_a_broken_spec_is_one_sentence(env: dict[str, str], sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        ShardSpec.from_env(env)


def test_a_status_survives_json_with_everything_nested_in_it() -> None:
    status = StatusReply(
        PROTOCOL_VERSION,
        "dep",
        "p0",
        Role.DECODE,
        2**63 + 1,
        FINGERPRINT,
        LIMITS,
        kv_tokens=1000,
        slots=8,
        ring_bytes=2**28,
        record_limit_bytes=2**26,
        bytes_per_token=46080,
        imports={"hit": 3, MissReason.OVERWRITTEN: 1},
    )
    assert StatusReply.from_dict(json.loads(json.dumps(status.to_dict()))) == status


def test_a_wait_reply_survives_json() -> None:
    reply = WaitReply(PROTOCOL_VERSION, HANDLE, found=False, reason=MissReason.MISSING)
    assert WaitReply.from_dict(json.loads(json.dumps(reply.to_dict()))) == reply


def test_a_miss_tells_its_reason() -> None:
    miss = BridgeMiss(MissReason.EPOCH, "p0 is at 7, not 6")
    assert (miss.reason, str(miss)) == (MissReason.EPOCH, "epoch: p0 is at 7, not 6")
    assert str(BridgeMiss(MissReason.CHECKSUM)) == "checksum"


def test_the_bridge_and_the_contract_need_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, tgi_patches.contract, tgi_patches.sidecar, tgi_patches.bridge.arena, "
        "tgi_patches.bridge.memory; print(sorted({'torch', 'numpy', 'orchestrator'} & sys.modules.keys()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
