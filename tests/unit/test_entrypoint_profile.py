"""What a container starts for each role: arguments untouched, defaults that yield to the user, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tgi_patches.contract import (
    EPOCH_VARIABLE,
    KEY_FILE_VARIABLE,
    KEY_VARIABLE,
    SPEC_VARIABLE,
    ContractError,
    Role,
    ShardSpec,
)
from tgi_patches.entrypoint.flags import split, value_of
from tgi_patches.entrypoint.health import address
from tgi_patches.entrypoint.launch import Launch, Places, launch_of
from tgi_patches.entrypoint.profile import graph_sizes

PLACES = Places("/opt/ours/overlay", "/usr/src/.venv")
BIN = "/opt/ours/overlay/tgi_patches/entrypoint/bin"
IMAGE = {"PATH": "/usr/bin:/bin", "PORT": "80", "HF_HOME": "/data", "HOSTNAME": "0f1e2d3c"}
"""Of TGI's image, and what Docker adds."""
SPEC: dict[str, Any] = {
    "deployment": "dep",
    "shard": "s0",
    "model": "/models/m",
    "model_name": "m",
    "dtype": "bfloat16",
    "host": "0.0.0.0",
    "port": 3100,
    "sidecar_port": 3101,
    "arena_dir": "/arenas",
    "arena_bytes": 1 << 30,
    "max_input_tokens": 8000,
    "max_total_tokens": 8192,
    "max_batch_prefill_tokens": 16384,
    "max_concurrent_requests": 96,
    "tensor_parallel": 2,
}
PREFILL = ("--prefill-specialization",)
DECODE = ("--decode-specialization",)


def launch(*arguments: str, env: dict[str, str] | None = None, spec: dict[str, Any] | None = None) -> Launch:
    told = {} if spec is None else {SPEC_VARIABLE: json.dumps(spec)}
    return launch_of(arguments, {**IMAGE, **told, **(env or {})}, 77, PLACES)


def added(made: Launch) -> dict[str, str]:
    """What the launcher gets that the image had not, or had otherwise; without the spec."""
    return {
        name: value for name, value in made.env.items() if IMAGE.get(name) != value and name != SPEC_VARIABLE
    }


def refusal(*arguments: str, env: dict[str, str] | None = None, spec: dict[str, Any] | None = None) -> str:
    with pytest.raises(ContractError) as refused:
        launch(*arguments, env=env, spec=spec)
    return str(refused.value)


SHARED = {
    "PATH": f"{BIN}:/usr/src/.venv/bin:/usr/bin:/bin",
    "VIRTUAL_ENV": "/usr/src/.venv",
    "PYTHONPATH": "/opt/ours/overlay",
    EPOCH_VARIABLE: "77",
    "MODEL_ID": "/models/m",
    "DTYPE": "bfloat16",
    "NUM_SHARD": "2",
    "PORT": "3100",
    "HOSTNAME": "0.0.0.0",
    "MAX_INPUT_TOKENS": "8000",
    "MAX_TOTAL_TOKENS": "8192",
}

# --- the environment of each role ---


def test_a_prefill_shard() -> None:
    made = launch(*PREFILL, spec=SPEC)
    assert added(made) == SHARED | {
        "CUDA_GRAPHS": "0",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
        "PREFIX_CACHING": "0",
        "MAX_BATCH_PREFILL_TOKENS": "16384",
        "MAX_CONCURRENT_REQUESTS": "96",
    }
    assert made.arguments == ()
    assert ShardSpec.from_env(made.env) == made.spec == ShardSpec(**SPEC, role=Role.PREFILL)


def test_a_decode_shard() -> None:
    assert added(launch(*DECODE, spec=SPEC)) == SHARED | {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "CUDA_GRAPHS": "1,2,4,8,16,32,64,96",
        "PREFIX_CACHING": "0",
        "MAX_BATCH_PREFILL_TOKENS": "1024",
        "MAX_CONCURRENT_REQUESTS": "120",
    }


def test_a_mixed_shard() -> None:
    assert added(launch(spec=SPEC | {"role": "mixed"})) == SHARED | {
        "PREFIX_CACHING": "0",
        "MAX_BATCH_PREFILL_TOKENS": "16384",
        "MAX_CONCURRENT_REQUESTS": "96",
    }


def test_without_flag_and_spec_it_is_tgi_as_its_own_entrypoint_starts_it() -> None:
    env = {KEY_VARIABLE: "k" * 16, "PYTHONHOME": "/elsewhere"}
    made = launch("--model-id", "m", env=env)
    assert (made.arguments, made.spec, made.sidecar_env) == (("--model-id", "m"), None, None)
    assert made.env == IMAGE | {
        "PATH": "/usr/src/.venv/bin:/usr/bin:/bin",
        "VIRTUAL_ENV": "/usr/src/.venv",
        KEY_VARIABLE: "k" * 16,
    }


def test_a_flag_alone_is_a_profile_without_overlay_and_sidecar() -> None:
    made = launch(*DECODE, "--model-id", "m")
    assert (made.arguments, made.spec, made.sidecar_env) == (("--model-id", "m"), None, None)
    assert added(made) == {
        "PATH": "/usr/src/.venv/bin:/usr/bin:/bin",
        "VIRTUAL_ENV": "/usr/src/.venv",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "CUDA_GRAPHS": "1,2,4,8,16,32,64,96,128",
        "PREFIX_CACHING": "0",
        "MAX_BATCH_PREFILL_TOKENS": "1024",
        "MAX_CONCURRENT_REQUESTS": "160",
    }
    assert set(added(launch(*PREFILL))) == {
        *("PATH", "VIRTUAL_ENV", "CUDA_GRAPHS", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "PREFIX_CACHING")
    }


def test_where_there_is_no_venv_path_stays() -> None:
    env = {**IMAGE, SPEC_VARIABLE: json.dumps(SPEC)}
    made = launch_of(PREFILL, env, 77, Places("/ours"))
    assert made.env["PATH"] == "/ours/tgi_patches/entrypoint/bin:/usr/bin:/bin"
    assert "VIRTUAL_ENV" not in made.env
    assert launch_of((), IMAGE, 77, Places("/ours")).env == IMAGE


# --- details of the profile ---


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (5, [1, 2, 4, 5]),
        (32, [1, 2, 4, 8, 16, 32]),
        (33, [1, 2, 4, 8, 16, 32, 33]),
        (64, [1, 2, 4, 8, 16, 32, 64]),
        (160, [1, 2, 4, 8, 16, 32, 64, 96, 128, 160]),
    ],
)
def test_graphs_go_up_to_the_batch_limit(limit: int, sizes: list[int]) -> None:
    assert graph_sizes(limit) == sizes


@pytest.mark.parametrize(("asked", "budget"), [(64, "512"), (512, "512"), (700, "700"), (1 << 20, "1024")])
def test_a_decode_shard_s_prefill_budget_is_low(asked: int, budget: str) -> None:
    made = launch(*DECODE, spec=SPEC | {"max_batch_prefill_tokens": asked})
    assert made.env["MAX_BATCH_PREFILL_TOKENS"] == budget


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (("--speculate", "2"), {}),
        (("--speculate=2",), {}),
        ((), {"SPECULATE": "3"}),
        ((), {"PREFILL_CHUNKING": "0"}),
    ],
)
def test_where_tgi_cannot_chunk_a_miss_must_fit_as_a_whole(
    arguments: tuple[str, ...], env: dict[str, str]
) -> None:
    made = launch(*DECODE, *arguments, env=env, spec=SPEC | {"max_batch_prefill_tokens": 2048})
    assert made.env["MAX_BATCH_PREFILL_TOKENS"] == "8000"
    assert "MAX_BATCH_PREFILL_TOKENS" not in launch(*DECODE, *arguments, env=env).env


@pytest.mark.parametrize("role", [PREFILL, ("mixed",)])
def test_prefix_caching_that_is_asked_for_is_the_launcher_s_decision(role: tuple[str, ...]) -> None:
    spec = SPEC | {"prefix_caching": True}
    made = launch(*PREFILL, spec=spec) if role == PREFILL else launch(spec=spec | {"role": "mixed"})
    assert "PREFIX_CACHING" not in made.env
    assert launch(*DECODE, spec=spec).env["PREFIX_CACHING"] == "0"


def test_float32_is_what_tgi_takes_by_itself() -> None:
    assert "DTYPE" not in launch(*PREFILL, spec=SPEC | {"dtype": "float32"}).env
    assert "DTYPE" not in launch(*PREFILL, "--quantize", "awq", spec=SPEC).env
    assert "DTYPE" not in launch(*PREFILL, spec=SPEC, env={"QUANTIZE": "awq"}).env


def test_a_pool_and_a_revision_are_passed_on() -> None:
    made = launch(*DECODE, spec=SPEC | {"kv_pool_tokens": 50_000, "revision": "abc"})
    assert (made.env["MAX_BATCH_TOTAL_TOKENS"], made.env["REVISION"]) == ("50000", "abc")


def test_attention_is_left_to_the_launcher() -> None:
    """It takes flashinfer, and another one for a model whose heads flashinfer does not know."""
    assert "ATTENTION" not in launch(*PREFILL, spec=SPEC).env


# --- the user wins ---


@pytest.mark.parametrize("role", [PREFILL, DECODE])
@pytest.mark.parametrize("where", ["environment", "tgi_env"])
def test_what_the_user_has_set_stays(role: tuple[str, ...], where: str) -> None:
    mine = {
        "CUDA_GRAPHS": "1,7",
        "PREFIX_CACHING": "1",
        "MAX_BATCH_PREFILL_TOKENS": "999",
        "MAX_CONCURRENT_REQUESTS": "9",
        "MODEL_ID": "/other",
        "DTYPE": "float16",
        "ATTENTION": "flashdecoding",
        "OTLP_ENDPOINT": "http://collector:4317",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",
        "HOSTNAME": "10.0.0.5",
    }
    if where == "environment":
        made = launch(*role, env=mine, spec=SPEC)
    else:
        made = launch(*role, spec=SPEC | {"tgi_env": mine})
    assert {name: made.env.get(name) for name in mine} == mine


def test_the_spec_s_variables_come_before_the_container_s() -> None:
    made = launch(*PREFILL, env={"CUDA_GRAPHS": "4"}, spec=SPEC | {"tgi_env": {"CUDA_GRAPHS": "8"}})
    assert made.env["CUDA_GRAPHS"] == "8"


@pytest.mark.parametrize(
    ("arguments", "env"), [((), {"MAX_INPUT_LENGTH": "5"}), (("--max-input-length", "5"), {})]
)
def test_the_old_name_of_the_input_limit_is_not_doubled(
    arguments: tuple[str, ...], env: dict[str, str]
) -> None:
    assert "MAX_INPUT_TOKENS" not in launch(*PREFILL, *arguments, env=env, spec=SPEC).env


def test_the_image_s_port_and_the_container_s_name_do_not_stand_in_the_way() -> None:
    made = launch(*PREFILL, spec=SPEC | {"host": "127.0.0.1"})
    assert (made.env["PORT"], made.env["HOSTNAME"]) == ("3100", "127.0.0.1")
    assert launch(*PREFILL, spec=SPEC | {"port": 0}).env["PORT"] == "80"


def test_a_user_s_python_path_comes_first_and_ours_last() -> None:
    made = launch(*PREFILL, env={"PYTHONPATH": "/mine:/too"}, spec=SPEC)
    assert made.env["PYTHONPATH"] == "/mine:/too:/opt/ours/overlay"


# --- the command line ---


def test_all_other_arguments_are_passed_on_in_order() -> None:
    odd = (
        "--model-id",
        "a b",
        "",
        "--",
        "$HOME *",
        "it's",
        '"',
        "--json-output",
        "--x=--prefill-specialization",
    )
    made = launch(odd[0], odd[1], *PREFILL, *odd[2:], *PREFILL, spec=SPEC)
    assert made.arguments == odd


def test_one_flag_or_the_other() -> None:
    assert split(("a", *DECODE, "b")) == (Role.DECODE, ("a", "b"))
    assert split(("a",)) == (None, ("a",))
    said = refusal(*PREFILL, *DECODE)
    assert said == "Give one of --prefill-specialization and --decode-specialization, not both."


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ((), None),
        (("--port", "1"), "1"),
        (("--port=1",), "1"),
        (("--port=1", "--port", "2"), "2"),
        (("--ports", "1", "--port-x=2"), None),
        (("--port",), ""),
        (("--port=",), ""),
    ],
)
def test_a_launcher_s_flag_is_read_as_it_reads_it(arguments: tuple[str, ...], value: str | None) -> None:
    assert value_of(arguments, "--port") == value


# --- the role and what is missing in the spec ---


def test_the_role_comes_from_the_spec_or_from_the_flag() -> None:
    by_spec = launch(spec=SPEC | {"role": "decode"})
    both = launch(*DECODE, spec=SPEC | {"role": "decode"})
    by_flag = launch(*DECODE, spec=SPEC)
    assert by_spec == both == by_flag


def test_a_spec_without_a_model_takes_the_launcher_s() -> None:
    bare = {key: value for key, value in SPEC.items() if key not in ("model", "model_name")}
    for made in (
        launch(*PREFILL, "--model-id", "org/m", env={"MODEL_ID": "not this"}, spec=bare),
        launch(*PREFILL, env={"MODEL_ID": "org/m"}, spec=bare),
    ):
        assert made.spec is not None
        assert (made.spec.model, made.spec.model_name) == ("org/m", "org/m")


@pytest.mark.parametrize(
    ("arguments", "env", "spec", "sentence"),
    [
        (PREFILL, {}, {"role": "decode"}, "The flag says prefill and the spec says decode: they must agree."),
        ((), {}, {}, "Name the shard's role: in the spec, or by --prefill-specialization or --decode-"),
        (PREFILL, {}, {"model": ""}, "Name the model: in the spec, or by --model-id or MODEL_ID."),
        (PREFILL, {"ATTENTION": "paged"}, {}, "A prefill shard cannot use ATTENTION=paged: "),
        (DECODE, {}, {"tgi_env": {"ATTENTION": "paged"}}, "A decode shard cannot use ATTENTION=paged: "),
        (
            PREFILL,
            {"NUM_SHARD": "4"},
            {},
            "The launcher gets --num-shard 4 and the spec says tensor_parallel 2",
        ),
        (
            (*DECODE, "--num-shard=1"),
            {},
            {},
            "The launcher gets --num-shard 1 and the spec says tensor_parallel",
        ),
        (
            (*DECODE, "--port", "80"),
            {},
            {},
            "The launcher gets --port 80 and the spec says port 3100: choose",
        ),
        (PREFILL, {}, {"arena_dir": ""}, "The spec needs an arena_dir: "),
        (PREFILL, {}, {"arena_bytes": 0}, "A prefill shard needs a ring for its records (arena_bytes)."),
        (DECODE, {}, {"sidecar_port": 0}, "The spec must give the sidecar a port of its own (sidecar_port)."),
        (DECODE, {}, {"sidecar_port": 3100}, "The spec must give the sidecar a port of its own"),
        (DECODE, {}, {"dtype": "int8"}, "TGI runs in float16, bfloat16 or float32, not in int8."),
        (DECODE, {}, {"shard": "a/b"}, "The shard name 'a/b' must be 1 to 64 characters"),
        (DECODE, {}, {"role": "verifier"}, "The flag says decode and the spec says verifier"),
        ((), {}, {"role": "verifier"}, "'verifier' is not a valid Role"),
        (DECODE, {SPEC_VARIABLE: "{"}, {}, "The variable ORCHESTRATOR_SHARD_SPEC is not JSON: "),
        (DECODE, {SPEC_VARIABLE: "[]"}, {}, "The variable ORCHESTRATOR_SHARD_SPEC must hold a JSON object."),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(
    arguments: tuple[str, ...], env: dict[str, str], spec: dict[str, Any], sentence: str
) -> None:
    said = refusal(*arguments, env=env, spec=SPEC | spec)
    assert sentence in said
    assert "\n" not in said


def test_paged_attention_is_a_mixed_shard_s_own_business() -> None:
    made = launch(env={"ATTENTION": "paged", "NUM_SHARD": "2"}, spec=SPEC | {"role": "mixed"})
    assert made.env["ATTENTION"] == "paged"


# --- who learns what ---


def test_the_key_goes_to_the_sidecar_and_the_hub_s_token_to_the_launcher() -> None:
    secrets = {KEY_VARIABLE: "k" * 16, KEY_FILE_VARIABLE: "/run/key", "HF_TOKEN": "hf_x", "API_KEY": "a"}
    made = launch(*PREFILL, env=secrets, spec=SPEC)
    assert made.sidecar_env is not None
    assert {name for name in secrets if name in made.env} == {"HF_TOKEN", "API_KEY"}
    assert {name for name in secrets if name in made.sidecar_env} == {KEY_VARIABLE, KEY_FILE_VARIABLE}


def test_the_sidecar_gets_its_order_and_nothing_that_steers_tgi() -> None:
    env = {"LANG": "C.UTF-8", "PYTHONPATH": "/mine", "ATTENTION": "flashinfer", EPOCH_VARIABLE: "1"}
    made = launch(*PREFILL, env=env, spec=SPEC)
    assert made.sidecar_env == {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PORT": "3100",
        EPOCH_VARIABLE: "77",
        SPEC_VARIABLE: made.env[SPEC_VARIABLE],
    }


@pytest.mark.parametrize(
    ("arguments", "port"), [((), "80"), (("--port", "5000"), "5000"), (("--port=5001",), "5001")]
)
def test_the_sidecar_knows_where_the_router_listens_without_a_port_in_the_spec(
    arguments: tuple[str, ...], port: str
) -> None:
    made = launch(*DECODE, *arguments, spec=SPEC | {"port": 0})
    assert made.sidecar_env is not None
    assert made.sidecar_env["PORT"] == port


def test_one_epoch_for_all_and_never_an_old_one() -> None:
    made = launch(*PREFILL, env={EPOCH_VARIABLE: "5"}, spec=SPEC)
    assert made.sidecar_env is not None
    assert made.env[EPOCH_VARIABLE] == made.sidecar_env[EPOCH_VARIABLE] == "77"


@pytest.mark.parametrize(
    ("env", "arguments", "where"),
    [
        ({SPEC_VARIABLE: json.dumps(SPEC)}, [], ("127.0.0.1", 3101)),
        ({SPEC_VARIABLE: json.dumps(SPEC | {"host": "10.0.0.5"})}, [], ("10.0.0.5", 3101)),
        ({"PORT": "80"}, [], ("127.0.0.1", 80)),
        ({"PORT": "80"}, ["python", "--port", "5000"], ("127.0.0.1", 5000)),
        ({}, [], ("127.0.0.1", 3000)),
    ],
)
def test_health_is_asked_of_the_sidecar_or_of_a_stock_router(
    env: dict[str, str], arguments: list[str], where: tuple[str, int]
) -> None:
    assert address(env, arguments) == where


def test_the_dockerfile_starts_this_entrypoint() -> None:
    text = (Path(__file__).parents[2] / "tgi_patches" / "Dockerfile").read_text()
    command = ["/opt/tgi-orchestrator/sidecar/bin/python", "-I", "-m", "tgi_patches.entrypoint.container"]
    assert f"\nENTRYPOINT {json.dumps(command)}\n" in text
    final = text.rpartition("FROM ")[2]
    assert "PYTHONPATH" not in final
    assert "ENV " not in final
