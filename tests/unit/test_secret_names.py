"""What counts as a secret: by name, by look, and by being repeated."""

from __future__ import annotations

import pytest

from orchestrator.core.secret_names import looks_secret, names_secret, repeats_secret, secret_values


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "hub-token", "API_KEY", "aws_secret_access_key", "SSH_KEYS", "MYPASSWORD", "DB_PASS"),
        *("PASSPHRASE", "GOOGLE_APPLICATION_CREDENTIALS", "BASIC_AUTH", "SESSION_COOKIE", "CLIENT_SECRET"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize(
    "name", ["MODEL_ID", "TEAM", "LOG_LEVEL", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS"]
)
def test_names_of_other_things(name: str) -> None:
    assert not names_secret(name)


@pytest.mark.parametrize(
    ("value", "secret"),
    [
        ("postgres://app:word@db/app", True),
        ("http://user@proxy:3128", True),
        ("hf_abcdefghijklmnopqrst", True),
        ("use sk-abcdefghijklmnop1234 here", True),
        ("Bearer abc", True),
        ("http://proxy:3128/a@b", False),
        ("hf_transfer", False),
        ("meta-llama/Llama-3.1-8B-Instruct", False),
    ],
)
def test_values_that_show_what_they_are(value: str, secret: bool) -> None:
    assert looks_secret(value) is secret


def test_a_secret_is_found_within_another_value_but_a_short_word_is_none() -> None:
    secrets = secret_values(
        {"A_KEY": "long-enough", "B_KEY": "true", "C": "plain", "D": "x://u:p@h"}, ["given-one"]
    )
    assert secrets == {"long-enough", "x://u:p@h", "given-one"}
    assert repeats_secret("say long-enough twice", secrets)
    assert not repeats_secret("true", secrets)
