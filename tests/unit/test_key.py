"""The deployment's key: read from one of two places, and a signature that covers every part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tgi_patches.contract import KEY_FILE_VARIABLE, KEY_VARIABLE, ContractError
from tgi_patches.key import check_keyed, key_from, sign, signed

KEY = b"k" * 32


def test_a_key_comes_from_the_environment_or_from_a_file_that_wins(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("f" * 16 + "\n")
    assert key_from({}) == b""
    assert key_from({KEY_VARIABLE: "e" * 16}) == b"e" * 16
    assert key_from({KEY_VARIABLE: "e" * 16, KEY_FILE_VARIABLE: str(file)}) == b"f" * 16


def test_a_key_that_cannot_be_used_is_refused_without_being_shown(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="cannot be read: No such file"):
        key_from({KEY_FILE_VARIABLE: str(tmp_path / "absent")})
    with pytest.raises(ContractError, match="at least 16 bytes") as short:
        key_from({KEY_VARIABLE: "hunter2hunter2"})
    assert "hunter2" not in str(short.value)
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(ContractError, match="at least 16 bytes"):
        key_from({KEY_FILE_VARIABLE: str(empty)})


NEAR = [("127.0.0.1", 1), ("127.9.9.9", 0), ("::1", 2), ("localhost", 3)]


def test_what_only_this_host_reaches_needs_no_key_and_with_one_every_address_may_be() -> None:
    check_keyed(b"", NEAR, "")
    check_keyed(KEY, [("0.0.0.0", 1), ("::", 2), ("10.0.0.1", 3)], "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "fd00::1", "localhost.example", "host"])
def test_what_others_may_reach_is_refused_without_a_key(host: str) -> None:
    with pytest.raises(ContractError) as refused:
        check_keyed(b"", [*NEAR, (host, 3101)], "name a key")
    assert str(refused.value) == f"{host}:3101 can be reached from other hosts: name a key."


def test_a_signature_is_the_known_one() -> None:
    """HMAC-SHA256 of each part behind its length, by another implementation (openssl)."""
    known = "031768b810bc2ead8afd2dfc461166e1f349fd7629f0f257b701cd1223050d77"
    assert sign(b"0123456789abcdef", "ab", "c") == known


def test_a_signature_fits_its_parts_and_its_key_only() -> None:
    signature = sign(KEY, "pull", "ab", "c")
    assert signed(KEY, signature, "pull", "ab", "c")
    assert signed(KEY, signature, b"pull", "ab", b"c")
    for parts in (("pull", "a", "bc"), ("pull", "abc"), ("pull", "ab", "c", ""), ("ab", "pull", "c")):
        assert not signed(KEY, signature, *parts)
    assert not signed(b"K" * 32, signature, "pull", "ab", "c")
    assert not signed(KEY, "", "pull", "ab", "c")
    assert not signed(KEY, "ünsigned", "pull", "ab", "c")


def test_without_a_key_only_an_empty_signature_fits() -> None:
    assert sign(b"", "pull") == ""
    assert signed(b"", "", "pull")
    assert not signed(b"", sign(KEY, "pull"), "pull")
