from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from orchestrator.access.keys import ApiKey, KeyRing, key_ring
from orchestrator.access.window import Limits
from orchestrator.errors import ConfigError

ONE = "sk-0123456789abcdef"
TWO = "sk-fedcba9876543210"


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys.yaml"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def ring(folder: Path, text: str, variable: str = "") -> KeyRing:
    found = key_ring(written(folder, text), variable)
    assert found is not None
    return found


def name(keys: KeyRing, header: bytes | None) -> str | None:
    found = keys.whose(header)
    return found and found.name


def test_a_file_holds_keys_digests_limits_and_priorities(tmp_path: Path) -> None:
    digest = hashlib.sha256(TWO.encode()).hexdigest()
    keys = ring(
        tmp_path,
        f"""keys:
  team-a: {ONE}
  team.b_2:
    key_sha256: {digest.upper()}
    requests_per_minute: 60
    concurrent_requests: 8
    tokens_per_minute: 100000
    priority: high
""",
    )
    assert keys.keys["team-a"] == ApiKey("team-a", hashlib.sha256(ONE.encode()).digest(), Limits(), 0)
    assert keys.keys["team.b_2"].limits == Limits(60, 8, 100_000)
    assert keys.keys["team.b_2"].priority == 1
    assert name(keys, f"Bearer {TWO}".encode()) == "team.b_2"


def test_file_and_variable_are_merged(tmp_path: Path) -> None:
    keys = ring(tmp_path, f"keys: {{a: {ONE}}}", f" b={TWO} ,")
    assert [name(keys, f"Bearer {key}".encode()) for key in (ONE, TWO)] == ["a", "b"]


def test_a_key_may_hold_an_equals_sign_in_the_variable() -> None:
    keys = key_ring(None, "a=0123456789abcdef==")
    assert keys is not None
    assert name(keys, b"Bearer 0123456789abcdef==") == "a"


def test_without_file_and_variable_nobody_needs_a_key() -> None:
    assert key_ring(None, "") is None


def test_a_file_that_takes_all_keys_away_lets_nobody_in(tmp_path: Path) -> None:
    assert name(ring(tmp_path, "keys: {}"), f"Bearer {ONE}".encode()) is None


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"Bearer {ONE}".encode(), "a"),
        (f"bearer {ONE}".encode(), "a"),
        (f"BEARER  {ONE} ".encode(), "a"),
        (f"Bearer {ONE.upper()}".encode(), None),
        (f"Bearer {ONE}x".encode(), None),
        (f"Bearer {ONE[:-1]}".encode(), None),
        (f"Basic {ONE}".encode(), None),
        (ONE.encode(), None),
        (b"Bearer ", None),
        (b"Bearer \xff\xfe", None),
        (b"", None),
        (None, None),
    ],
)
def test_only_the_very_key_behind_bearer_counts(header: bytes | None, expected: str | None) -> None:
    keys = key_ring(None, f"a={ONE},b={TWO}")
    assert keys is not None
    assert name(keys, header) == expected


BAD_FILES = [
    ("", "must hold `keys:`"),
    ("[]", "must hold `keys:`"),
    (f"keys: [{ONE}]", "must hold `keys:`"),
    (f"keys: {{a: {ONE}}}\nmore: 1", "must hold `keys:`"),
    (f"keys: {{a: {ONE}, a: {TWO}}}", "names something twice (line 1)"),
    (f"keys:\n  a: {{key: {ONE}, key: {TWO}}}", "names something twice (line 2)"),
    (f"keys: {{a: {ONE}, b: {ONE}}}", "b has the same key as another name"),
    (f"keys: {{'a b': {ONE}}}", "the name of entry 1 must be"),
    (f"keys: {{1: {ONE}}}", "the name of entry 1 must be"),
    (f"keys: {{{'n' * 65}: {ONE}}}", "the name of entry 1 must be"),
    ("keys: {a: sk-01234567890a}", "the key of a must be 16 to 512"),
    ("keys: {a: 'sk-0123456789abcdef x'}", "the key of a must be 16 to 512"),
    ("keys: {a: 1234567890123456}", "a: key must be text: put it in quotes"),
    ("keys: {a: {}}", "a needs `key` or `key_sha256`, and not both"),
    ("keys: {a: }", "a needs `key` or `key_sha256`, and not both"),
    (f"keys: {{a: {{key: {ONE}, key_sha256: {'a' * 64}}}}}", "a needs `key` or `key_sha256`, and not both"),
    ("keys: {a: {key_sha256: abc}}", "key_sha256 of a must be 64 hexadecimal digits"),
    (f"keys: {{a: {{{ONE}: 1}}}}", "a: only key, key_sha256, requests_per_minute"),
    (f"keys: {{a: {{key: {ONE}, requests_per_minute: 0}}}}", "requests_per_minute: Input should be greater"),
    (f"keys: {{a: {{key: {ONE}, tokens_per_minute: {ONE}}}}}", "tokens_per_minute: Input should be a valid"),
    (
        f"keys: {{a: {{key: {ONE}, concurrent_requests: true}}}}",
        "concurrent_requests: Input should be a valid",
    ),
    (
        f"keys: {{a: {{key: {ONE}, priority: {ONE}}}}}",
        "a: priority: Input should be 'low', 'normal' or 'high'",
    ),
    (f"keys: {{a: {{key: {ONE}, 7: 1}}}}", "a: only key"),
    (f"keys: {{a: {ONE}", "is not YAML (line 1)"),
    (f"keys: !!python/object:os.system {ONE}", "is not YAML (line 1)"),
    (f"keys: {{a: '{ONE}\x07'}}", "is not YAML"),
    (f"keys: {{? [{ONE}] : {TWO}}}", "is not YAML"),
]


@pytest.mark.parametrize(("text", "expected"), BAD_FILES)
def test_a_bad_file_is_refused_in_one_sentence_without_a_key(
    tmp_path: Path, text: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ring(tmp_path, text)
    sentence = str(caught.value)
    assert expected in sentence
    assert "keys.yaml" in sentence
    assert "\n" not in sentence
    assert ONE not in sentence
    assert TWO not in sentence


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (ONE, "entry 1 must look like name=key"),
        (f"a={ONE},b", "entry 2 must look like name=key"),
        ("a=short", "the key of a must be 16 to 512"),
        (f"a={ONE},a={TWO}", "the API key a is named twice"),
        (f"a={ONE},b={ONE}", "b has the same key as another name"),
    ],
)
def test_a_bad_variable_is_refused_in_one_sentence_without_a_key(variable: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        key_ring(None, variable)
    assert str(caught.value).startswith("ORCHESTRATOR_API_KEYS: ")
    assert expected in str(caught.value)
    assert ONE not in str(caught.value)


def test_a_name_may_not_stand_in_file_and_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the API key a is named twice"):
        ring(tmp_path, f"keys: {{a: {ONE}}}", f"a={TWO}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys file .*missing\.yaml cannot be read: No such file"):
        key_ring(tmp_path / "missing.yaml", "")
    (tmp_path / "keys.yaml").write_bytes(b"keys: {a: \xff}")
    with pytest.raises(ConfigError, match=r"keys\.yaml is not text"):
        key_ring(tmp_path / "keys.yaml", "")


def test_a_file_that_everybody_can_read_is_told(tmp_path: Path) -> None:
    with capture_logs() as logs:
        key_ring(written(tmp_path, f"keys: {{a: {ONE}}}", 0o600), "")
        assert logs == []
        key_ring(written(tmp_path, f"keys: {{a: {ONE}}}", 0o644), "")
    assert [line["event"] for line in logs] == ["secret_readable_by_all"]
