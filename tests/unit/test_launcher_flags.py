"""Whatever way TGI's launcher was told something, it is read as the launcher reads it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.launcher_flags import FLAGS, SWITCHES, Becomes, as_arguments, told, variable_of
from orchestrator.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "env", "values"),
    [
        (["--model-id", "a/b"], {}, {"model-id": ("a/b",)}),
        (["--model-id=a/b"], {}, {"model-id": ("a/b",)}),
        ([], {"MODEL_ID": "a/b"}, {"model-id": ("a/b",)}),
        (["--model-id", "a/b"], {"MODEL_ID": "c/d"}, {"model-id": ("a/b",)}),
        (["-p", "80"], {"PORT": "3000"}, {"port": ("80",)}),
        (["-p80"], {}, {"port": ("80",)}),
        (["-p=80"], {}, {"port": ("80",)}),
        (["--json-output", "--port", "80"], {}, {"json-output": ("true",), "port": ("80",)}),
        ([], {"JSON_OUTPUT": "true", "TRUST_REMOTE_CODE": "0"}, {"json-output": ("true",)}),
        ([], {"TRUST_REMOTE_CODE": "False", "NGROK": ""}, {}),
        ([], {"QUANTIZE": ""}, {}),
        (["--sharded", "true"], {}, {"sharded": ("true",)}),
        (
            ["--cors-allow-origin", "a", "--cors-allow-origin=b"],
            {},
            {"cors-allow-origin": ("a", "b")},
        ),
        (["--revision", "--odd"], {}, {"revision": ("--odd",)}),
        (["a", "word", "--port", "80"], {}, {"port": ("80",)}),
        (["--port"], {}, {}),
        ([], {"ENV": "production"}, {}),
        (["-e"], {}, {"env": ("true",)}),
    ],
)
def test_every_spelling_of_a_flag(
    arguments: list[str], env: dict[str, str], values: dict[str, tuple[str, ...]]
) -> None:
    assert told(arguments, env).values == values


def test_unknown_flags_are_kept_by_name_and_take_no_known_one_with_them() -> None:
    found = told(["--new", "--port", "80", "--auth-file=abc", "--other", "x", "--model-id", "m"], {})
    assert (found.unknown, found.hidden) == (("new", "auth-file", "other"), ("abc",))
    assert found.values == {"port": ("80",), "model-id": ("m",)}


def test_numbers_are_whole_and_above_nothing() -> None:
    assert told(["--num-shard", "4"], {}).number("num-shard") == 4
    assert told([], {}).number("num-shard") is None
    for text in ("0", "-1", "4.0", "four", "²"):
        with pytest.raises(ConfigError, match=r"--num-shard \(NUM_SHARD\) is no whole number"):
            told([f"--num-shard={text}"], {}).number("num-shard")


VALUES = st.dictionaries(
    st.sampled_from(sorted(FLAGS)), st.text("abc/-=", min_size=1, max_size=6), min_size=1, max_size=6
)


@given(VALUES)
def test_what_is_written_as_flags_is_read_as_the_same(values: dict[str, str]) -> None:
    given_ = {name: ("true" if name in SWITCHES else value,) for name, value in values.items()}
    assert told(as_arguments(given_), {}).values == given_


@given(VALUES)
def test_a_variable_says_the_same_as_its_flag(values: dict[str, str]) -> None:
    values = {name: value for name, value in values.items() if name not in SWITCHES}
    by_flag = told(as_arguments({name: (value,) for name, value in values.items()}), {})
    by_env = told([], {variable_of(name): value for name, value in values.items()})
    assert by_flag.values == by_env.values
    for becomes in Becomes:
        assert by_flag.those(becomes) == by_env.those(becomes)
