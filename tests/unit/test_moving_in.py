"""Settings from containers as Docker's engine showed them (recorded in `stock_containers`)."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.commands.init import check
from orchestrator.config import load_settings
from orchestrator.core.moving_in import Here, Moved, moved
from orchestrator.core.settings_text import settings_text
from orchestrator.core.stock import ALL, Gpus, Published, Stock, stock_of
from orchestrator.errors import ConfigError

RECORDED = Path(__file__).parent / "stock_containers"
IMAGE_ENV = {
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    "HF_HOME": "/data",
    "HF_HUB_ENABLE_HF_TRANSFER": "1",
    "PORT": "80",
    "PYTHON_VERSION": "3.11",
    "HF_KERNELS_CACHE": "/kernels",
    "EXLLAMA_NO_FLASH_ATTN": "1",
    "NVARCH": "x86_64",
    "CUDA_VERSION": "12.4.1",
}
GPUS = tuple(f"GPU-7d1f3c52-5f0e-4c2b-9d3a-0a1b2c3d4e0{index}" for index in range(1, 5))
HERE = Here(port=8090, gpus=GPUS)
NEVER = "NeverToBeSeen"
"""Begins every secret of the recorded containers."""


def recorded(name: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return told


def stock(name: str) -> Stock:
    return stock_of(recorded(name), IMAGE_ENV)


def changed(name: str, **parts: Any) -> Stock:
    """A recorded container with parts of its HostConfig or Config replaced."""
    told = copy.deepcopy(recorded(name))
    for key, value in parts.items():
        section = "Config" if key in told["Config"] else "HostConfig"
        told[section][key] = value
    return stock_of(told, IMAGE_ENV)


def with_env(name: str, *entries: str) -> Stock:
    return changed(name, Env=[*recorded(name)["Config"]["Env"], *entries])


def text_of(out: Moved) -> str:
    return settings_text(out.values, out.comments, head=["From a test."], notes=out.notes)


def said(out: Moved) -> str:
    return " ".join(out.notes)


def test_flags_of_docker_run_become_settings() -> None:
    arguments = [
        *("--kv-cache-dtype", "fp8_e4m3fn", "--trust-remote-code", "--max-batch-size", "48"),
        *("--rope-scaling", "dynamic", "--rope-factor", "2.0"),
    ]
    out = moved(stock("flags"), HERE)
    assert out.values == {
        "version": 1,
        "deployment": "flags",
        "model.id": "meta-llama/Llama-3.1-8B-Instruct",
        "model.revision": "0e9e39f249a16976918f6564b8830bc894c91659",
        "model.dtype": "bfloat16",
        "model.token_file": "~/.config/tgi-orchestrator/hub-token",
        "model.cache": "/srv/tgi",
        "launcher": "docker",
        "shards.prefill.count": 1,
        "shards.prefill.gpus": [[GPUS[0]]],
        "shards.prefill.args": arguments,
        "shards.prefill.shm_bytes": 2**30,
        "shards.decode.count": 1,
        "shards.decode.gpus": [[GPUS[1]]],
        "shards.decode.args": arguments,
        "shards.decode.shm_bytes": 2**30,
        "shards.mixed.count": 0,
        "shards.mixed.args": arguments,
        "shards.mixed.shm_bytes": 2**30,
        "gateway.listen": "127.0.0.1:8090",
        "limits.max_input_tokens": 8000,
        "limits.max_total_tokens": 8192,
        "limits.max_batch_prefill_tokens": 16384,
        "limits.max_concurrent_requests": 64,
    }
    notes = said(out)
    assert "--hostname, --cuda-graphs" in notes
    assert "gateway.listen: 0.0.0.0:8080, and gateway.allow_anonymous: true" in notes
    assert "docker update --restart=no flags" in notes
    assert f"flags holds {GPUS[0]}, {GPUS[1]} while it runs" in notes
    assert "| sed -n 's/^HF_TOKEN=//p' > ~/.config/tgi-orchestrator/hub-token)" in notes


def test_variables_of_compose_become_the_same_settings() -> None:
    out = moved(stock("compose"), HERE)
    role = {
        "args": ["--quantize", "fp8", "--json-output"],
        "env": {"ATTENTION": "flashdecoding", "TEAM": "search", "TOKENIZERS_PARALLELISM": "false"},
        "shm_bytes": 2**30,
        "tp": 2,
    }
    shards: dict[str, Any] = {
        "prefill": role | {"count": 1, "gpus": [list(GPUS[:2])]},
        "decode": role | {"count": 1, "gpus": [list(GPUS[2:])]},
        "mixed": role | {"count": 0},
    }
    assert out.values == {
        "version": 1,
        "deployment": "compose",
        "model.id": "mistralai/Mistral-7B-Instruct-v0.3",
        "model.token_file": "~/.config/tgi-orchestrator/hub-token",
        "launcher": "docker",
        **{f"shards.{name}.{key}": value for name, each in shards.items() for key, value in each.items()},
        "gateway.listen": "127.0.0.1:8090",
        "gateway.keys_file": "~/.config/tgi-orchestrator/keys.yaml",
        "limits.max_input_tokens": 4000,
        "limits.max_total_tokens": 6000,
    }
    notes = said(out)
    assert "Left out, since they look like secrets: DATABASE_URL." in notes
    assert "the volume tgi_weights, which the engine keeps in /var/lib/docker/volumes" in notes
    assert "s/^HUGGING_FACE_HUB_TOKEN=//p" in notes
    assert "s/^API_KEY=//p" in notes
    assert "Compose started the container (project search)" in notes
    assert "set gateway.listen: 127.0.0.1:8081, and start" in notes


def test_all_gpus_of_a_container_without_a_count_of_ranks_are_one_mixed_shard_as_they_are_now() -> None:
    out = moved(stock("gpus-all"), HERE)
    assert {key: out.values[key] for key in out.values if key.startswith("shards.mixed")} == {
        "shards.mixed.count": 1,
        "shards.mixed.gpus": [list(GPUS)],
        "shards.mixed.tp": 4,
        "shards.mixed.args": ["--speculate", "2", "--lora-adapters", "a/one,b/two"],
    }
    assert (out.values["shards.prefill.count"], out.values["shards.decode.count"]) == (0, 0)
    assert "give prefill and decode 2 each" in said(out)
    assert "Every shard loads the adapters" in said(out)


def test_a_model_folder_is_named_as_this_host_has_it() -> None:
    assert moved(stock("gpus-all"), HERE).values["model.id"] == "/srv/tgi/llama"


def test_a_path_that_no_mount_holds_is_left_as_it_is_and_told() -> None:
    out = moved(changed("gpus-all", Cmd=["--model-id", "/database/llama"]), HERE)
    assert out.values["model.id"] == "/database/llama"
    assert "/database/llama is in the container only: copy it to this host" in said(out)


def test_the_innermost_mount_has_the_model_and_a_volume_is_told() -> None:
    inner = {
        "Type": "volume",
        "Name": "llamas",
        "Source": "/var/lib/llamas/_data",
        "Destination": "/data/llama",
    }
    told = recorded("gpus-all")
    told["Mounts"].append(inner)
    out = moved(stock_of(told, IMAGE_ENV), HERE)
    assert out.values["model.id"] == "/var/lib/llamas/_data"
    assert out.values["model.cache"] == "/srv/tgi"
    assert "The model is in the volume llamas, which the engine keeps in /var/lib/llamas/_data" in said(out)


def test_without_nvml_all_gpus_are_left_to_placement_and_a_note_says_so() -> None:
    out = moved(stock("gpus-all"), Here(port=8090))
    assert (out.values["shards.prefill.count"], out.values["shards.decode.count"]) == (1, 1)
    assert not any(key.endswith((".gpus", ".tp")) for key in out.values)
    assert "NVML cannot be asked from here" in said(out)


def test_one_gpu_is_left_to_placement_and_an_own_cache_is_found_again() -> None:
    out = moved(stock("one-gpu"), HERE)
    assert not any(key.endswith(".gpus") for key in out.values)
    assert out.values["model.cache"] == "/srv/hub"
    assert out.values["shards.decode.args"] == ["--huggingface-hub-cache", "/data"]
    assert f"The container has one GPU, {GPUS[0]}" in said(out)
    assert "does not have these flags, so they are left out: --no-such-flag." in said(out)
    assert "anything" not in text_of(out)


def test_a_shell_line_is_read_and_its_secret_stays_out() -> None:
    out = moved(stock("shell"), Here(port=18084))
    assert out.values == {
        "version": 1,
        "deployment": "shell",
        "model.id": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "model.dtype": "float32",
        "launcher": "docker",
        "shards.prefill.count": 1,
        "shards.prefill.env": {"MODEL": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        "shards.decode.count": 1,
        "shards.decode.env": {"MODEL": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        "shards.mixed.count": 0,
        "shards.mixed.env": {"MODEL": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        "gateway.listen": "127.0.0.1:18084",
        "gateway.keys_file": "~/.config/tgi-orchestrator/keys.yaml",
        "limits.payload_bytes": 4_000_000,
    }
    notes = said(out)
    assert "the embedded CPU shard stands in for TGI" in notes
    assert "Left out, since the embedded CPU shard has no such flags: --max-best-of." in notes
    assert "TGI's API key is an argument and is not copied" in notes
    assert "set gateway.listen: 0.0.0.0:18083, and start" in notes


def test_where_a_container_is_reached() -> None:
    assert (stock("shell").published, stock("shell").address) == (Published("", 18083), "172.17.0.2:3001")
    assert (stock("flags").published, stock("flags").address) == (Published("", 8080), "")
    assert stock("compose").published == Published("127.0.0.1", 8081)
    assert changed("flags", NetworkMode="host").published == Published("", 80)
    assert changed("flags", PortBindings={}).published is None


def test_gpus_by_the_runtime_of_nvidia() -> None:
    assert changed("shell", Runtime="nvidia").gpus == Gpus(count=ALL)
    assert with_env("shell", "NVIDIA_VISIBLE_DEVICES=0,GPU-b").gpus == Gpus(("0", "GPU-b"))
    assert with_env("shell", "NVIDIA_VISIBLE_DEVICES=void").gpus == Gpus()
    cdi = [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"], "Count": 0}]
    assert changed("shell", DeviceRequests=cdi).gpus == Gpus(count=ALL)
    assert stock("shell").gpus == Gpus()


def test_limits_that_tgi_chose_itself_come_from_what_it_says() -> None:
    info = {"max_input_tokens": 131_071, "max_total_tokens": 131_072, "max_concurrent_requests": 128}
    out = moved(stock("one-gpu"), Here(port=1, gpus=GPUS, info=info))
    limits = {key: value for key, value in out.values.items() if key.startswith("limits.")}
    assert limits == {"limits.max_input_tokens": 131_071, "limits.max_total_tokens": 131_072}
    assert "131071 tokens need large rings" in said(out)
    assert "Nothing tells the longest prompt that one-gpu takes" in said(moved(stock("one-gpu"), HERE))


@pytest.mark.parametrize(
    ("arguments", "info", "limits"),
    [
        (["--max-total-tokens", "2000"], None, (1999, 2000)),
        (["--max-input-tokens", "8000"], None, (8000, 9024)),
        (["--max-input-tokens", "8000"], {"max_total_tokens": 8192}, (8000, 8192)),
        (["--max-total-tokens", "2000"], {"max_input_tokens": 1500}, (1500, 2000)),
        (["--max-total-tokens", "2000"], {"max_input_tokens": 4095}, (1999, 2000)),
        ([], {"max_input_tokens": 10, "max_total_tokens": "many"}, (None, None)),
        ([], {}, (None, None)),
    ],
)
def test_one_limit_alone_gives_a_pair_that_our_settings_accept(
    arguments: list[str], info: dict[str, Any] | None, limits: tuple[int | None, int | None]
) -> None:
    out = moved(changed("flags", Cmd=["--model-id", "x", *arguments]), Here(1, GPUS, info))
    check(out)
    found = (out.values.get("limits.max_input_tokens"), out.values.get("limits.max_total_tokens"))
    assert found == limits


def test_float16_is_a_flag_for_every_shard_as_no_setting_has_it() -> None:
    out = moved(with_env("gpus-all", "DTYPE=float16"), HERE)
    assert "model.dtype" not in out.values
    assert out.values["shards.mixed.args"][:2] == ["--dtype", "float16"]


@pytest.mark.parametrize(
    ("image", "said_of_it"),
    [
        ("ghcr.io/huggingface/text-generation-inference:3.3.7", ""),
        ("ghcr.io/huggingface/text-generation-inference:3.2.1", "The container runs TGI 3.2.1. The overlay"),
        ("ghcr.io/huggingface/text-generation-inference:latest", "does not tell its TGI's version"),
        ("registry.example:5000/tgi", "does not tell its TGI's version"),
        ("registry.example:5000/tgi:team-3.3.7", ""),
    ],
)
def test_another_version_of_tgi_is_told(image: str, said_of_it: str) -> None:
    notes = said(moved(changed("flags", Image=image), HERE))
    assert (said_of_it in notes) if said_of_it else ("TGI 3" not in notes and "version" not in notes)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (
            {"Image": "nginx:1", "Entrypoint": ["/docker-entrypoint.sh"], "Cmd": ["nginx"]},
            r"'flags' \(nginx:1\) does not run TGI",
        ),
        ({"Image": "ghcr.io/huggingface/text-generation-inference:3.3.7-rocm"}, "runs TGI for rocm"),
        ({"Image": "ghcr.io/huggingface/text-generation-inference:3.3.7-gaudi"}, "runs TGI for gaudi"),
        ({"Devices": [{"PathOnHost": "/dev/kfd"}]}, "runs TGI for another accelerator"),
        ({"Labels": {"tgi-orchestrator.deployment": "blue"}}, "shard of the deployment 'blue' already"),
        (
            {"Cmd": ["--max-total-tokens", "many"]},
            r"--max-total-tokens \(MAX_TOTAL_TOKENS\) is no whole number",
        ),
        ({"Cmd": ["--num-shard=0"]}, "--num-shard .* is no whole number above 0"),
        ({"Entrypoint": ["sh", "-c", "text-generation-launcher --model-id 'x"]}, "quotes do not close"),
    ],
)
def test_what_cannot_be_taken_over_is_one_sentence(parts: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        moved(changed("flags", **parts), HERE)


def test_settings_that_would_be_refused_are_told_before_a_file_is_written() -> None:
    out = moved(changed("flags", Cmd=["--max-input-tokens", "500", "--max-total-tokens", "400"]), HERE)
    with pytest.raises(ConfigError, match=r"limits: max_input_tokens \(500\) must be below"):
        check(out)


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.iterdir()))
def test_every_file_is_accepted_by_our_own_settings_and_holds_no_secret(name: str, tmp_path: Path) -> None:
    out = moved(stock(name), HERE)
    check(out)
    file = tmp_path / "orchestrator.yaml"
    file.write_text(text_of(out))
    assert NEVER not in file.read_text()
    loaded = load_settings(file, {}, {})
    assert loaded.settings.deployment == name
    for key, value in out.values.items():
        assert loaded.origins[key] == f"file {file}"
        got: Any = loaded.settings
        for part in key.split("."):
            got = getattr(got, part)
        assert got == value or str(got) == str(Path(str(value)).expanduser())


def test_a_value_that_repeats_a_secret_elsewhere_goes_too() -> None:
    out = moved(with_env("gpus-all", "APP_PASSWORD=Hidden-Word", "GREETING=say Hidden-Word"), HERE)
    assert "Hidden-Word" not in text_of(out)
    assert "look like secrets: APP_PASSWORD, GREETING." in said(out)
    out = moved(with_env("flags", "APP_PASSWORD=meta-llama"), HERE)
    assert "model.id" not in out.values
    assert "model.id is left out: the container has a secret in it." in out.notes


def test_the_token_of_a_flag_that_tgi_does_not_have_stays_out_as_well() -> None:
    out = moved(
        changed("flags", Cmd=["--model-id", "x", "--hub-token", "Hidden-Word", "--other=Hidden-Word"]), HERE
    )
    assert "Hidden-Word" not in text_of(out)
    assert "--hub-token, --other" in said(out)


SECRET_NAMES = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "MY_", "aws_", "Db"]),
    st.sampled_from(
        ["TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH", "passwd", "API_KEY", "HF_TOKEN"]
    ),
    st.sampled_from(["", "_1", "S", "_FILE"]),
)
SECRETS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=6, max_size=30
).map(lambda text: f"\u00a7{text}\u00a7")
"""Between marks that stand in no sentence of ours."""
OTHERS = st.sampled_from(["FOO", "MODEL_ID", "QUANTIZE", "OTLP_ENDPOINT", "REVISION", "MY_URL"])


@settings(deadline=None)
@given(
    secrets=st.dictionaries(SECRET_NAMES, SECRETS, min_size=1, max_size=4),
    others=st.dictionaries(
        OTHERS, st.sampled_from(["plain", "{secret}", "http://u:{secret}@h", "x {secret} y"])
    ),
    name=st.sampled_from(["flags", "compose", "shell", "gpus-all"]),
    as_flag=st.sampled_from(["--api-key", "--ngrok-authtoken", "--auth-token", "--json-output"]),
)
def test_no_secret_is_ever_written(
    secrets: dict[str, str], others: dict[str, str], name: str, as_flag: str
) -> None:
    first = next(iter(secrets.values()))
    told = recorded(name)
    env = secrets | {key: value.replace("{secret}", first) for key, value in others.items()}
    told["Config"]["Env"] += [f"{key}={value}" for key, value in env.items()]
    told["Config"]["Cmd"] = [*(told["Config"]["Cmd"] or ()), as_flag, first]
    out = moved(stock_of(told, IMAGE_ENV), HERE)
    written = text_of(out)
    assert yaml.safe_load(written)["version"] == 1
    for secret in secrets.values():
        assert not any(
            secret in str(part) for part in [*out.values.values(), *out.notes, *out.comments.values()]
        )
        assert secret not in written
