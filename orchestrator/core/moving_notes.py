"""What a mover from a stock TGI must know and do beside the settings, in sentences and commands.  Pure."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.core.carried import BY_ROLE, Carried
from orchestrator.core.launcher_flags import Becomes, variable_of
from orchestrator.core.stock import Stock

KNOWN_VERSION = "3.3.7"
"""The TGI that the overlay knows."""
CONFIG_HOME = "~/.config/tgi-orchestrator"
TOKEN_FILE = f"{CONFIG_HOME}/hub-token"
KEYS_FILE = f"{CONFIG_HOME}/keys.yaml"
COMMAND = "  "
"""What a note begins with that is a command, to be copied."""


def token_notes(stock: Stock, name: str) -> list[str]:
    """How the hub's token, in the container's variable `name`, gets into its file."""
    return [
        "The hub token is not copied. Put it where model.token_file says, without showing it:",
        f"{COMMAND}{_into(TOKEN_FILE, _variable(stock, name))}",
    ]


def key_notes(stock: Stock) -> list[str]:
    """The same for the API key that TGI asks its clients for."""
    if not stock.env.get("API_KEY"):
        return [
            (
                "TGI's API key is an argument and is not copied: put it into the file of gateway.keys_file "
                "as `keys: {moved: KEY}` (docs/access.md)."
            )
        ]
    key = f"printf 'keys: {{moved: %s}}\\n' \"$({_variable(stock, 'API_KEY')})\""
    return [
        "TGI's API key is not copied. Put it where gateway.keys_file says, without showing it:",
        f"{COMMAND}{_into(KEYS_FILE, key)}",
    ]


def remarks(stock: Stock, carried: Carried) -> Iterator[str]:
    """About everything that was not taken over, or not as it was."""
    yield from _about_version(stock)
    yield from _about_flags(stock, carried)
    yield from _about_env(stock, carried)
    yield from _about_the_end(stock)


def _variable(stock: Stock, name: str) -> str:
    """A command that prints a variable of the container, stopped or not."""
    template = "{{range .Config.Env}}{{println .}}{{end}}"
    return f"docker inspect --format '{template}' {stock.name} | sed -n 's/^{name}=//p'"


def _into(file: str, command: str) -> str:
    return f"(umask 077; mkdir -p {CONFIG_HOME}; {command} > {file})"


def _about_version(stock: Stock) -> Iterator[str]:
    if not stock.gpus or stock.version == KNOWN_VERSION:
        return
    runs = (
        f"runs TGI {stock.version}" if stock.version else f"({stock.image}) does not tell its TGI's version"
    )
    yield (
        f"The container {runs}. The overlay knows {KNOWN_VERSION}, and shards run that one; an image of "
        "another version (TGI_TAG in docs/container.md) is served mixed."
    )


def _about_flags(stock: Stock, carried: Carried) -> Iterator[str]:
    told = stock.told
    shared = told.those(Becomes.SHARED)
    if ours := [name for name in told.those(Becomes.OURS) if _users(name, stock)]:
        yield f"Left out, since the orchestrator sets it for each shard: {_flags(ours)}."
    if carried.hidden_flags:
        yield f"Left out, since the value holds a secret: {_flags(carried.hidden_flags)}."
    if not stock.gpus and shared:
        yield f"Left out, since the embedded CPU shard has no such flags: {_flags(shared)}."
        shared = {}
    if told.one("cors-allow-origin"):
        yield "The gateway sends no CORS headers: let a reverse proxy add them (--cors-allow-origin)."
    if any(told.one(name) for name in ("ngrok", "ngrok-authtoken", "ngrok-edge")):
        yield "The gateway opens no tunnel (--ngrok): put one in front of it."
    if told.one("weights-cache-override"):
        yield "Left out: --weights-cache-override. Name the folder with the weights in model.id."
    if paths := [name for name, values in shared.items() if any(v.startswith("/") for v in values)]:
        yield f"Shards see the model's folder and the cache, no other path of the container: {_flags(paths)}."
    if told.one("dtype") == "float16" and not stock.gpus:
        yield "The embedded CPU shard has no float16: it computes in float32."
    if told.one("lora-adapters"):
        yield "Every shard loads the adapters of --lora-adapters; ask for each before you move."
    if told.one("speculate"):
        yield "With --speculate TGI cuts no prompt into chunks: one whose record is lost runs in one piece."
    if told.unknown:
        yield f"TGI {KNOWN_VERSION} does not have these flags, so they are left out: {_flags(told.unknown)}."


def _users(name: str, stock: Stock) -> bool:
    """Said by a flag, or by a variable that the image does not set."""
    variable = variable_of(name)
    return variable not in stock.env or variable in stock.own_env


def _flags(names: tuple[str, ...] | list[str] | dict[str, tuple[str, ...]]) -> str:
    return ", ".join(f"--{name}" for name in names)


def _about_env(stock: Stock, carried: Carried) -> Iterator[str]:
    if carried.hidden_env:
        yield (
            f"Left out, since they look like secrets: {', '.join(carried.hidden_env)}. shards.*.env is for "
            "everybody who may ask the engine: give shards that need them an image of your own."
        )
    if stock.env.get("ATTENTION") == "paged":
        yield "ATTENTION=paged is left out: its prefill cannot go on from KV of another shard."
    if by_role := sorted(name for name in stock.own_env if name in BY_ROLE):
        yield f"Left out, since each role has its own: {', '.join(by_role)}."


def _about_the_end(stock: Stock) -> Iterator[str]:
    if stock.memory_bytes:
        yield (
            f"The container may use {stock.memory_bytes} bytes of memory. Each shard is a container of its "
            "own: shards.*.memory_bytes limits one, its arena not counted."
        )
    if stock.compose:
        yield (
            f"Compose started the container (project {stock.compose}): `docker compose stop` there when "
            "traffic has moved."
        )
    elif stock.restart:
        yield (
            f"The container's restart policy is {stock.restart}: `docker update --restart=no {stock.name}` "
            "before you stop it for good."
        )
