from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from orchestrator.access import tls
from orchestrator.errors import ConfigError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one` and `two`, each `.pem` and `.key`; `locked.key` is that of `one` under a password."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("one", "two"):
        openssl(
            folder,
            f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name}.test "
            f"-addext subjectAltName=DNS:{name}.test -days 2 -keyout {name}.key -out {name}.pem",
        )
    openssl(folder, "pkcs8 -topk8 -in one.key -out locked.key -passout pass:secret-word")
    return folder


def openssl(folder: Path, arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def pair(pairs: Path, tmp_path: Path) -> Path:
    """A folder with `cert.pem` and `cert.key`: the pair `one`."""
    install(pairs, tmp_path, "one")
    return tmp_path


def install(pairs: Path, folder: Path, name: str, key: str | None = None) -> None:
    shutil.copy(pairs / f"{name}.pem", folder / "cert.pem")
    shutil.copy(pairs / f"{key or name}.key", folder / "cert.key")


def context(folder: Path) -> ssl.SSLContext:
    return tls.server_context(folder / "cert.pem", folder / "cert.key")


def served(server: ssl.SSLContext, most: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> tuple[bytes, str | None]:
    """The certificate that a client of a new handshake is shown, and the protocol that was agreed."""
    client = ssl.create_default_context()
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    client.maximum_version = most
    client.set_alpn_protocols(["h2", "http/1.1"])
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname="one.test")
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (ours, theirs) * 3:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            pass
    return ours.getpeercert(binary_form=True) or b"", ours.selected_alpn_protocol()


def certificate(pairs: Path, name: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert((pairs / f"{name}.pem").read_text())


def test_a_client_is_shown_the_certificate_and_agrees_on_http_1_1(pairs: Path, pair: Path) -> None:
    assert served(context(pair)) == (certificate(pairs, "one"), "http/1.1")


def test_tls_1_2_is_the_least(pairs: Path, pair: Path) -> None:
    server = context(pair)
    assert server.minimum_version == ssl.TLSVersion.TLSv1_2
    assert served(server, ssl.TLSVersion.TLSv1_2)[0] == certificate(pairs, "one")


def test_new_handshakes_use_the_certificate_that_was_read_again(pairs: Path, pair: Path) -> None:
    server = context(pair)
    install(pairs, pair, "two")
    assert served(server)[0] == certificate(pairs, "one")
    with capture_logs() as logs:
        tls.reload(server)
    assert logs[-1]["event"] == "certificate_read"
    assert served(server)[0] == certificate(pairs, "two")


@pytest.mark.parametrize("broken", ["mismatch", "locked", "no key", "missing", "cut off"])
def test_a_pair_that_cannot_be_used_leaves_the_old_one_in_place(pairs: Path, pair: Path, broken: str) -> None:
    server = context(pair)
    _break(pairs, pair, broken)
    with capture_logs() as logs:
        tls.reload(server)
    assert [(line["event"], line["log_level"]) for line in logs][-1] == ("not_reloaded", "error")
    assert served(server)[0] == certificate(pairs, "one")


def _break(pairs: Path, pair: Path, how: str) -> None:
    if how == "mismatch":
        install(pairs, pair, "two", key="one")
    elif how == "locked":
        install(pairs, pair, "one", key="locked")
    elif how == "no key":
        shutil.copy(pairs / "one.pem", pair / "cert.key")
    elif how == "missing":
        (pair / "cert.pem").unlink()
    else:
        text = (pairs / "two.pem").read_text()
        (pair / "cert.pem").write_text(text[: len(text) // 2])


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ("mismatch", "The TLS key KEY does not fit the certificate CERT."),
        ("locked", "The TLS key KEY is encrypted: nobody is there to type its password."),
        ("no key", "The TLS key KEY holds no private key in PEM."),
        ("missing", "The TLS certificate CERT cannot be read: No such file or directory."),
    ],
)
def test_a_pair_that_cannot_be_used_is_refused_in_one_sentence(
    pairs: Path, pair: Path, broken: str, sentence: str
) -> None:
    _break(pairs, pair, broken)
    with pytest.raises(ConfigError) as caught:
        context(pair)
    told = str(caught.value).replace(str(pair / "cert.pem"), "CERT").replace(str(pair / "cert.key"), "KEY")
    assert told == sentence


def test_a_certificate_that_is_cut_off_or_none_is_refused(pairs: Path, pair: Path) -> None:
    _break(pairs, pair, "cut off")
    with pytest.raises(ConfigError, match="cannot be used: "):
        context(pair)
    (pair / "cert.pem").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="holds no certificate in PEM"):
        context(pair)


def test_the_key_is_left_in_no_open_file(pair: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    server = context(pair)
    tls.reload(server)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
