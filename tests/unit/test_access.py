"""Who comes in by which door; keys and limits have files of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from orchestrator.access import Access, NotFound, check_access, check_exposure
from orchestrator.config import load_settings
from orchestrator.errors import ConfigError, InvalidRequest, Unauthorized
from orchestrator.settings import GatewaySection

KEY = "sk-0123456789abcdef"
TOKEN = "admin-0123456789abcdef"
KEYS = {"ORCHESTRATOR_API_KEYS": f"a={KEY}"}

NEEDS_KEY = [
    ("POST", "/"),
    ("POST", "/generate"),
    ("POST", "/generate_stream"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/generate/"),
    ("GET", "/generate"),
    ("POST", "/a_route_of_tomorrow"),
    ("GET", "/administrator"),
]
FREE = [
    ("GET", "/info"),
    ("GET", "/v1/models"),
    ("GET", "/docs"),
    ("GET", "/docs/oauth2-redirect"),
    ("GET", "/api-doc/openapi.json"),
]
HEALTH = [("GET", "/"), ("HEAD", "/"), ("GET", "/health"), ("GET", "/ping")]
ADMIN = [("GET", "/metrics"), ("GET", "/admin/status"), ("POST", "/admin/anything"), ("GET", "/admin")]


def access(env: Mapping[str, str] | None = None, **gateway: Any) -> Access:
    return Access.open(GatewaySection(**gateway), env or {})


def token_file(folder: Path, token: str = TOKEN) -> Path:
    path = folder / "token"
    path.write_text(token + "\n", encoding="utf-8")
    path.chmod(0o600)
    return path


def shown(secret: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + secret.encode()}


@pytest.mark.parametrize(("method", "path"), NEEDS_KEY)
def test_what_generates_and_what_nobody_knows_needs_a_key(method: str, path: str) -> None:
    door = access(KEYS)
    assert door.visit(method, path, shown(KEY)).key_name == "a"
    with pytest.raises(Unauthorized, match=r"A key is needed: `authorization: Bearer KEY`\."):
        door.visit(method, path, {})
    with pytest.raises(Unauthorized, match="is not known") as caught:
        door.visit(method, path, shown(KEY + "x"))
    assert KEY not in str(caught.value)
    assert (caught.value.status, caught.value.body()["error_type"]) == (401, "unauthorized")


@pytest.mark.parametrize(("method", "path"), [*FREE, *HEALTH])
def test_information_and_health_are_free(method: str, path: str) -> None:
    assert access(KEYS).visit(method, path, {}).key_name == ""


@pytest.mark.parametrize(("method", "path"), [*NEEDS_KEY, *FREE, *HEALTH, *ADMIN])
def test_without_keys_everybody_of_this_machine_is_served(method: str, path: str) -> None:
    for door in (access(), Access.anybody()):
        visit = door.visit(method, path, shown("whatever"))
        assert (visit.key_name, visit.priority) == ("", 0)
        visit.leave(tokens=10)
        visit.leave()


# --- administration -------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_administration_is_open_on_loopback_even_with_keys(method: str, path: str) -> None:
    access(KEYS).visit(method, path, {})


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_administration_needs_a_key_where_other_machines_reach_it(method: str, path: str) -> None:
    door = access(KEYS, listen="0.0.0.0:3000")
    door.visit(method, path, shown(KEY))
    with pytest.raises(Unauthorized):
        door.visit(method, path, {})


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_administration_needs_the_token_where_there_is_one(tmp_path: Path, method: str, path: str) -> None:
    door = access(KEYS, admin_token_file=token_file(tmp_path), admin_listen="127.0.0.1:3001")
    door.visit(method, path, shown(TOKEN), admin_port=True)
    for secret in (KEY, TOKEN[:-1]):
        with pytest.raises(Unauthorized):
            door.visit(method, path, shown(secret), admin_port=True)
    with pytest.raises(Unauthorized):
        door.visit(method, path, {}, admin_port=True)
    with pytest.raises(NotFound):
        door.visit(method, path, shown(TOKEN))


@pytest.mark.parametrize("listen", ["127.0.0.1:3000", "0.0.0.0:3000"])
def test_the_token_opens_the_administration_and_nothing_else(tmp_path: Path, listen: str) -> None:
    door = access(KEYS, listen=listen, admin_token_file=token_file(tmp_path))
    door.visit("GET", "/metrics", shown(TOKEN))
    with pytest.raises(Unauthorized):
        door.visit("GET", "/metrics", shown(KEY))
    with pytest.raises(Unauthorized):
        door.visit("POST", "/generate", shown(TOKEN))


@pytest.mark.parametrize(("method", "path"), [*NEEDS_KEY, *FREE])
def test_the_admin_port_answers_nothing_else(method: str, path: str) -> None:
    with pytest.raises(NotFound) as caught:
        access(KEYS, admin_listen="127.0.0.1:3001").visit(method, path, shown(KEY), admin_port=True)
    assert (caught.value.status, caught.value.body()) == (
        404,
        {"error": "Not Found", "error_type": "not_found"},
    )


@pytest.mark.parametrize(("method", "path"), HEALTH)
def test_health_answers_on_both_ports(method: str, path: str) -> None:
    door = access(KEYS, admin_listen="127.0.0.1:3001")
    door.visit(method, path, {})
    door.visit(method, path, {}, admin_port=True)


def test_an_admin_port_on_loopback_is_open_and_one_that_others_reach_is_not() -> None:
    access(KEYS, listen="0.0.0.0:3000", admin_listen="127.0.0.1:3001").visit(
        "GET", "/metrics", {}, admin_port=True
    )
    reached = access(KEYS, admin_listen="[::]:3001")
    with pytest.raises(Unauthorized):
        reached.visit("GET", "/metrics", {}, admin_port=True)
    reached.visit("GET", "/metrics", shown(KEY), admin_port=True)


def test_another_token_holds_after_a_reload_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    door = access(admin_token_file=token_file(tmp_path))
    token_file(tmp_path, "short")
    with capture_logs() as logs:
        door.reload()
    assert [(line["event"], line["what"]) for line in logs] == [("not_reloaded", "admin_token")]
    door.visit("GET", "/metrics", shown(TOKEN))
    token_file(tmp_path, "another-0123456789abcdef")
    door.reload()
    door.visit("GET", "/metrics", shown("another-0123456789abcdef"))
    with pytest.raises(Unauthorized):
        door.visit("GET", "/metrics", shown(TOKEN))


@pytest.mark.parametrize("token", ["", "short", "two words of a token"])
def test_a_token_that_is_none_is_refused_without_showing_it(tmp_path: Path, token: str) -> None:
    with pytest.raises(ConfigError, match=r"^The token in .*token must be 16 to 512 visible") as caught:
        access(admin_token_file=token_file(tmp_path, token))
    assert token == "" or f" {token} " not in str(caught.value)


# --- priorities -----------------------------------------------------------------------------------


def asked(door: Access, priority: bytes | None) -> int:
    headers = shown(KEY) if priority is None else shown(KEY) | {b"x-orchestrator-priority": priority}
    return door.visit("POST", "/generate", headers).priority


@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [
        ("high", b"high", 1),
        ("high", None, 0),
        ("normal", b"high", 0),
        ("normal", b"low", -1),
        ("low", None, -1),
        ("low", b"normal", -1),
        ("low", b"high", -1),
    ],
)
@pytest.mark.parametrize("limit", ["", ", concurrent_requests: 5"])
def test_nobody_rises_above_the_own_key(
    tmp_path: Path, own: str, given: bytes | None, expected: int, limit: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.touch(0o600)
    file.write_text(f"keys: {{a: {{key: {KEY}, priority: {own}{limit}}}}}")
    assert asked(access(keys_file=file), given) == expected


def test_without_keys_anybody_may_ask_for_any_priority() -> None:
    assert [asked(access(), word) for word in (b"high", b"normal", b"low", None)] == [1, 0, -1, 0]


@pytest.mark.parametrize("word", [b"", b"HIGH", b"1", b"urgent"])
@pytest.mark.parametrize("env", [{}, KEYS])
def test_a_priority_that_is_none_is_the_clients_mistake(word: bytes, env: Mapping[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="`high`, `normal` or `low`"):
        asked(access(env), word)


# --- exposure -------------------------------------------------------------------------------------


@pytest.mark.parametrize("listen", ["127.0.0.1:3000", "127.8.0.9:0", "[::1]:3000", "localhost:3000"])
def test_loopback_needs_no_key(listen: str) -> None:
    check_exposure(GatewaySection(listen=listen), {})


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:3000", "[::]:3000", "10.0.0.7:80", "a.host:80", "localhost.a.host:80", "1270.0.1:80"]
)
def test_an_address_that_others_reach_needs_keys_or_a_word(listen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Access.open(GatewaySection(listen=listen), {})
    assert str(caught.value) == (
        f"gateway.listen is {listen}, which other machines reach, and there are no API keys: "
        "name them in gateway.keys_file, or set gateway.allow_anonymous."
    )
    check_exposure(GatewaySection(listen=listen), KEYS)
    check_exposure(GatewaySection(listen=listen, keys_file="/k"), {})
    check_exposure(GatewaySection(listen=listen, allow_anonymous=True), {})


def test_keys_and_no_keys_at_once_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave one out"):
        check_exposure(GatewaySection(allow_anonymous=True), KEYS)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"listen": "0.0.0.0:3000"}, "gateway.listen is 0.0.0.0:3000, which other machines reach"),
        ({"keys_file": "/nowhere/keys.yaml"}, "keys file /nowhere/keys.yaml cannot be read"),
        ({"admin_token_file": "/nowhere/token"}, "admin token file /nowhere/token cannot be read"),
        ({"tls_cert": "/nowhere/c", "tls_key": "/nowhere/k"}, "TLS certificate /nowhere/c cannot be read"),
    ],
)
def test_all_that_can_be_wrong_is_found_before_anything_starts(section: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_access(GatewaySection(**section), {})
    check_access(GatewaySection(), {})


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"gateway.tls_cert": "/c.pem"}, "gateway: tls_cert needs tls_key beside it."),
        ({"gateway.tls_key": "/k.pem"}, "gateway: tls_key needs tls_cert beside it."),
        (
            {"gateway.admin_listen": "127.0.0.2:3000"},
            "gateway: admin_listen and listen have the port 3000: each needs its own.",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(flags: Mapping[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, flags, {})
    assert str(caught.value) == sentence


def test_an_admin_address_that_others_reach_is_refused_where_nothing_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"admin_listen is 0\.0\.0\.0:3001, which other machines reach"):
        access(admin_listen="0.0.0.0:3001")
    access(admin_listen="127.0.0.1:3001").close()
    access(admin_listen="0.0.0.0:3001", allow_anonymous=True).close()
    access(KEYS, admin_listen="0.0.0.0:3001").close()
