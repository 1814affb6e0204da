"""Moving in from a container that a user started: shaped like TGI's, with the embedded engine in it.

The file that `init` writes is used as it is: `verify` launches its shards on the same engine.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess, run

import httpx
import pytest
import yaml

from orchestrator.config import load_settings
from orchestrator.shards.docker.names import DEPLOYMENT_LABEL

from .cli import DockerLine
from .engine import docker, inspected, left_of, until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

READY_S = 180.0
VERIFY_S = 400.0
PORT = 8080
SECRET = "hf_NeverToBeSeenAnywhere0009"
LAUNCHER = """\
#!/bin/sh
# TGI's launcher, as far as a test needs it: one mixed shard of the embedded engine.
model="$MODEL_ID" port="${PORT:-3000}"
while [ $# -gt 0 ]; do
    case "$1" in
        --model-id) model="$2"; shift ;;
        --model-id=*) model="${1#*=}" ;;
        -p | --port) port="$2"; shift ;;
    esac
    shift
done
say() { printf '"%s": "%s", ' "$1" "$2"; }
spec="$(say deployment stock)$(say shard stock)$(say role mixed)$(say dtype float32)$(say model "$model")"
spec="$spec$(say model_name "$(basename "$model")")$(say host 0.0.0.0)$(say arena_dir /arenas)"
export ORCHESTRATOR_SHARD_SPEC="{$spec \\"port\\": $port}"
exec python -m orchestrator.embedded.shard
"""
DOCKERFILE = """\
FROM {base}
COPY text-generation-launcher /usr/local/bin/
ENV HF_HOME=/data PORT=80
ENTRYPOINT ["text-generation-launcher"]
CMD ["--json-output"]
"""
Start = Callable[..., str]


@pytest.fixture(scope="module")
def tgi_image(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """As TGI's own: a launcher on PATH, port 80, the hub's files below /data."""
    context = tmp_path_factory.mktemp("tgi")
    (context / "text-generation-launcher").write_text(LAUNCHER)
    (context / "text-generation-launcher").chmod(0o755)
    (context / "Dockerfile").write_text(DOCKERFILE.format(base=cpu_image))
    name = f"test-{uuid.uuid4().hex[:8]}/text-generation-inference:3.3.7"
    docker("build", "--tag", name, str(context), limit_s=READY_S)
    yield name
    docker("image", "rm", name)


@pytest.fixture
def start(tgi_image: str, unique: str) -> Iterator[Start]:
    """Starts such a container; gone after the test.  It carries no label of ours: a user started it."""
    names: list[str] = []

    def started(model: Path, *options: str, arguments: tuple[str, ...] = ()) -> str:
        names.append(f"{unique}-stock{len(names)}")
        at = f"/models/{model.name}"
        docker(
            *("run", "--detach", "--name", names[-1], f"--volume={model}:{at}:ro", *options),
            *(tgi_image, "--model-id", at, *arguments),
        )
        return names[-1]

    yield started
    for name in names:
        docker("rm", "--force", "--volumes", name)


def url_of(name: str) -> str:
    """Of the container itself, once it serves."""
    address = inspected(name)["NetworkSettings"]["Networks"]["bridge"]["IPAddress"]
    url = f"http://{address}:{PORT}"

    def serves() -> bool:
        assert inspected(name)["State"]["Running"], docker("logs", name)[-2000:]
        try:
            return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    until(serves, f"{name} serves", READY_S)
    return url


@pytest.fixture
def line(docker_cli: DockerLine) -> DockerLine:
    """What a user types who has only the file that `init` writes, and an image for its shards."""
    for key in ("LAUNCHER", "DEPLOYMENT", "MODEL__ID", "MODEL__DTYPE"):
        del docker_cli.env[f"ORCHESTRATOR_{key}"]
    return docker_cli


def init(line: DockerLine, name: str, file: Path, *flags: str) -> CompletedProcess[str]:
    return line.run("init", "--from-container", name, "--output", str(file), *flags)


def test_a_running_container_becomes_a_settings_file(
    line: DockerLine, start: Start, mounted_model: Path, tmp_path: Path
) -> None:
    name = start(
        mounted_model,
        *(f"--env=HF_TOKEN={SECRET}", "--env=TEAM=search", "--publish=127.0.0.1::8080"),
        arguments=("--port", str(PORT), "--max-concurrent-requests=64"),
    )
    file = tmp_path / "orchestrator.yaml"
    url_of(name)
    published = int(inspected(name)["NetworkSettings"]["Ports"][f"{PORT}/tcp"][0]["HostPort"])
    done = init(line, name, file)
    assert (done.returncode, done.stderr) == (0, "")
    told = yaml.safe_load(file.read_text())
    assert int(told["gateway"]["listen"].removeprefix("127.0.0.1:")) > published
    del told["gateway"]
    shard = {"env": {"TEAM": "search"}}
    assert told == {
        "version": 1,
        "deployment": name,
        "model": {
            "id": str(mounted_model),
            "dtype": "float32",
            "token_file": "~/.config/tgi-orchestrator/hub-token",
        },
        "launcher": "docker",
        "shards": {
            "prefill": {"count": 1, **shard},
            "decode": {"count": 1, **shard},
            "mixed": {"count": 0, **shard},
        },
        # Lengths are from /info, since the launcher was not told.
        "limits": {
            "max_input_tokens": 4095,
            "max_total_tokens": 4096,
            "max_concurrent_requests": 64,
        },
    }
    assert load_settings(file, {}, {}).settings.deployment == name


def test_verify_against_the_container_passes_with_its_model_and_fails_with_another(
    line: DockerLine, start: Start, mounted_model: Path, tmp_path: Path
) -> None:
    name = start(mounted_model, arguments=("-p", str(PORT)))
    url, file = url_of(name), tmp_path / "orchestrator.yaml"
    assert init(line, name, file).returncode == 0

    same = line.run("verify", "--config", str(file), "--against", url, limit_s=VERIFY_S)
    assert same.returncode == 0, same.stdout + same.stderr
    for checked in ("model", "routes", "token ids"):
        assert any(row.split()[:2] == ["✓", checked.split()[0]] for row in same.stdout.splitlines()), checked
    assert f"answers identical to {url}" in same.stdout
    assert "0 cases skipped" in same.stdout
    assert "✓ chat, tool call, stream" in same.stdout

    other = tmp_path / "other"
    shutil.copytree(mounted_model, other)
    line.env["ORCHESTRATOR_MODEL__ID"] = str(other)
    different = line.run("verify", "--config", str(file), "--against", url, limit_s=VERIFY_S)
    assert different.returncode == 1, different.stdout + different.stderr
    assert (
        f"The models differ: the deployment serves other, the reference {mounted_model.name}."
        in different.stdout
    )
    assert "No answer was compared." in different.stdout
    assert left_of(name) == []
    assert inspected(name)["State"]["Running"], "the stock container serves on"


def test_init_of_a_stopped_container_and_over_a_file_that_is_there(
    line: DockerLine, start: Start, mounted_model: Path, tmp_path: Path
) -> None:
    name = start(mounted_model, f"--env=API_KEY={SECRET}", arguments=("--port", str(PORT)))
    docker("stop", "--time=1", name)
    file = tmp_path / "orchestrator.yaml"
    file.write_text("mine\n")
    refused = init(line, name, file)
    assert (refused.returncode, file.read_text()) == (2, "mine\n")
    assert refused.stderr == f"{file} exists: name another file with --output, or give --force.\n"
    printed = init(line, name, file, "--print")
    assert (printed.returncode, file.read_text()) == (0, "mine\n")
    assert yaml.safe_load(printed.stdout)["model"]["id"] == str(mounted_model)
    assert init(line, name, file, "--force").returncode == 0
    assert file.read_text() == printed.stdout
    assert SECRET not in printed.stdout
    assert "Nothing tells the longest prompt" in " ".join(printed.stdout.replace("#", "").split())


def test_the_command_in_the_note_puts_the_token_into_its_file(
    line: DockerLine, start: Start, mounted_model: Path, tmp_path: Path
) -> None:
    name = start(
        mounted_model, f"--env=HF_TOKEN={SECRET}", f"--env=API_KEY={SECRET}", arguments=("--port=1",)
    )
    docker("kill", name)
    done = init(line, name, tmp_path / "orchestrator.yaml")
    commands = [row.strip() for row in done.stdout.splitlines() if row.strip().startswith("(umask 077;")]
    assert len(commands) == 2
    for command in commands:
        asked = run(
            ["sh", "-c", command], capture_output=True, text=True, env=line.env | {"HOME": str(tmp_path)}
        )
        assert (asked.returncode, asked.stdout, asked.stderr) == (0, "", "")
    folder = tmp_path / ".config" / "tgi-orchestrator"
    assert (folder / "hub-token").read_text() == f"{SECRET}\n"
    assert yaml.safe_load((folder / "keys.yaml").read_text()) == {"keys": {"moved": SECRET}}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_containers_that_cannot_be_moved_in_are_one_sentence(
    line: DockerLine, start: Start, unique: str, cpu_image: str, mounted_model: Path, tmp_path: Path
) -> None:
    stock = start(mounted_model, arguments=("--port", str(PORT)))
    other, ours = f"{unique}-other", f"{unique}-ours"
    docker("create", "--name", other, f"--label={DEPLOYMENT_LABEL}x={unique}", cpu_image, "version")
    docker("create", "--name", ours, f"--label={DEPLOYMENT_LABEL}={unique}", cpu_image, "version")
    try:
        said = {name: init(line, name, tmp_path / "o.yaml") for name in ("missing", other, ours)}
    finally:
        docker("rm", other)
    assert {done.returncode for done in said.values()} == {2}
    assert said["missing"].stderr.startswith(f"There is no container 'missing' on {line.host}; TGI runs in ")
    assert stock in said["missing"].stderr
    assert f"The container {other!r} ({cpu_image}) does not run TGI" in said[other].stderr
    assert f"The container {ours!r} is a shard of the deployment {unique!r} already." in said[ours].stderr
    assert list(tmp_path.iterdir()) == []
    line.env["ORCHESTRATOR_DOCKER__HOST"] = "unix:///nowhere/docker.sock"
    unreachable = init(line, stock, tmp_path / "o.yaml")
    assert (unreachable.returncode, unreachable.stderr.count("\n")) == (3, 1)
