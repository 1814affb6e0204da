"""The command line.  Options stand here, work in `commands`; nothing heavy is imported for `--help`.

Exit codes: 0 ok, 1 a check failed, 2 bad input, 3 unreachable.  Errors are one sentence on stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from orchestrator.cli_bench import bench_app
from orchestrator.cli_docker import docker_commands
from orchestrator.cli_options import (
    Config,
    Deployment,
    Dtype,
    Json,
    KeysFile,
    Listen,
    Model,
    RedisUrl,
    TlsCert,
    TlsKey,
    Url,
    Workers,
)
from orchestrator.errors import ConfigError, OrchestratorError
from tgi_patches.contract import ContractError


class Commands(TyperGroup):
    """Turns our own errors into a sentence and an exit code; `--debug` keeps the traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (OrchestratorError, ContractError) as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(str(error), err=True)
            code = error.exit_code if isinstance(error, OrchestratorError) else ConfigError.exit_code
            raise typer.Exit(code) from None


app = typer.Typer(
    cls=Commands,
    help="Runs TGI shards as prefill and decode phases and relays their KV caches.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at the settings.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")
app.add_typer(docker_commands)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of our own errors.")] = False,
) -> None:
    """Options of every command; `Commands` reads them."""


def _gateway_flags(
    workers: int | None, tls_cert: Path | None, tls_key: Path | None, keys_file: Path | None
) -> dict[str, Any]:
    return {
        "gateway.workers": workers,
        "gateway.tls_cert": tls_cert,
        "gateway.tls_key": tls_key,
        "gateway.keys_file": keys_file,
    }


@app.command()
def up(
    config: Config = None,
    model: Model = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub model.")] = None,
    dtype: Dtype = None,
    prefill: Annotated[int | None, typer.Option(help="Number of prefill shards.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of decode shards.")] = None,
    mixed: Annotated[int | None, typer.Option(help="Number of mixed shards.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the gateway; 0 for any free one.")] = None,
    workers: Workers = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    keys_file: KeysFile = None,
    redis: RedisUrl = None,
    tgi_python: Annotated[
        str | None,
        typer.Option(help="Drive TGI's own server, of this interpreter, in place of the built-in engine."),
    ] = None,
    deployment: Deployment = None,
    detach: Annotated[bool, typer.Option("--detach", help="Run in the background.")] = False,
    as_json: Json = False,
    report_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Start Redis, shards, conductor and gateway, and stay until Ctrl-C."""
    from orchestrator.commands.common import settings_of
    from orchestrator.commands.up import start

    flags = {
        "model.id": model,
        "model.revision": revision,
        "model.dtype": dtype,
        "shards.prefill.count": prefill,
        "shards.decode.count": decode,
        "shards.mixed.count": mixed,
        **_gateway_flags(workers, tls_cert, tls_key, keys_file),
        "redis.url": redis,
        "tgi.python": tgi_python,
        "deployment": deployment,
    }
    start(settings_of(config, flags, port=port), detach=detach, as_json=as_json, report_fd=report_fd)


@app.command()
def down(
    config: Config = None,
    deployment: Deployment = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for its end.")] = 30.0,
    force: Annotated[
        bool, typer.Option("--force", help="Remove containers of that name whoever launched them.")
    ] = False,
) -> None:
    """Stop the deployment that runs on this machine, and remove its containers."""
    from orchestrator.commands.common import settings_of
    from orchestrator.commands.down import stop_deployment

    stop_deployment(settings_of(config, {"deployment": deployment}), timeout_s=timeout, force=force)


@app.command()
def status(
    config: Config = None, deployment: Deployment = None, url: Url = None, as_json: Json = False
) -> None:
    """Show shards, reservations and outstanding records."""
    from orchestrator.commands.common import deployment_name, plain_url, running_state
    from orchestrator.commands.status import show_status

    where = plain_url(url) if url else running_state(deployment_name(config, deployment)).url
    show_status(where, as_json=as_json)


@app.command()
def serve(
    config: Config = None,
    redis: RedisUrl = None,
    listen: Listen = None,
    workers: Workers = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    keys_file: KeysFile = None,
    deployment: Deployment = None,
    fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a gateway alone, for a deployment whose Redis is given."""
    from orchestrator.commands.common import settings_of
    from orchestrator.commands.serve import run_gateway

    flags = {
        "redis.url": redis,
        "gateway.listen": listen,
        **_gateway_flags(workers, tls_cert, tls_key, keys_file),
        "deployment": deployment,
    }
    run_gateway(settings_of(config, flags), fd=fd)


@app.command()
def shard(
    role: Annotated[str, typer.Option(help="prefill, decode or mixed.")],
    listen: Annotated[str, typer.Option(help="Address for the gateway, such as 10.0.0.1:3001.")],
    pull_listen: Annotated[
        str | None, typer.Option(help="Address at which other hosts fetch records, such as 10.0.0.1:3101.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with the deployment's key.")] = None,
    name: Annotated[str | None, typer.Option(help="Name; the default is ROLE-0.")] = None,
    cpus: Annotated[str | None, typer.Option(help="CPU cores, such as 0,1; the default is one.")] = None,
    config: Config = None,
    model: Model = None,
    dtype: Dtype = None,
    deployment: Deployment = None,
) -> None:
    """Run one shard for a deployment on another host, until SIGTERM or Ctrl-C."""
    from orchestrator.commands.common import settings_of
    from orchestrator.commands.shard import run_shard, wanted_shard

    flags = {
        "model.id": model,
        "model.dtype": dtype,
        "deployment": deployment,
        "arena.pull_listen": pull_listen,
        "key_file": key_file,
    }
    run_shard(settings_of(config, flags), wanted_shard(role, listen, name, cpus))


@app.command()
def logs(
    shard: Annotated[str, typer.Argument(help="A shard such as decode-0, or gateway, or conductor.")],
    config: Config = None,
    deployment: Deployment = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many of the last lines.")] = 50,
) -> None:
    """Show the log of a shard."""
    from orchestrator.commands.common import settings_of
    from orchestrator.commands.logs import show_log

    show_log(settings_of(config, {"deployment": deployment}), shard, lines=lines, follow=follow)


@app.command()
def degrade(
    config: Config = None,
    deployment: Deployment = None,
    redis: Annotated[
        str | None, typer.Option("--redis", help="Redis URL; the default is the running deployment's.")
    ] = None,
    to: Annotated[str | None, typer.Option(help="Hold this level: 0 to 4, or its name.")] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Let the conductor choose again.")] = False,
    reason: Annotated[str, typer.Option(help="Why, in a sentence that clients and operators see.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would hold, change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Show the mode, or set it: shorter answers, then only requests that matter more."""
    from orchestrator.commands.common import settings_of
    from orchestrator.commands.degrade import Wish, degrade_deployment

    loaded = settings_of(config, {"deployment": deployment, "redis.url": redis})
    wish = Wish(to=to, auto=auto, reason=reason, dry_run=dry_run)
    degrade_deployment(loaded, wish, as_json=as_json)


@config_app.command("show")
def config_show(
    config: Config = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    as_json: Json = False,
) -> None:
    """Show every setting."""
    from orchestrator.commands.config import show_config

    show_config(config, origin=origin, as_json=as_json)


@app.command()
def verify(
    config: Config = None,
    deployment: Deployment = None,
    url: Url = None,
    against: Annotated[
        str | None,
        typer.Option("--against", "--reference", help="URL of a stock TGI with the same model."),
    ] = None,
    against_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key that this TGI asks for.")
    ] = None,
    model: Model = None,
    dtype: Dtype = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest difference of two logprobs; the default is the dtype's.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Also ask all greedy cases, so many at once.")] = 1,
    as_json: Json = False,
) -> None:
    """Prove that the separated pair answers exactly as one shard, or as a stock TGI, does."""
    from orchestrator.commands.common import plain_url, settings_of
    from orchestrator.commands.verify import Wanted, run_verify

    loaded = settings_of(config, {"deployment": deployment, "model.id": model, "model.dtype": dtype})
    wanted = Wanted(
        url=plain_url(url) if url else None,
        against=plain_url(against) if against else None,
        against_key_file=against_key_file,
        tolerance=tolerance,
        concurrency=concurrency,
    )
    run_verify(loaded, wanted, as_json=as_json)


@app.command()
def version() -> None:
    """Show the version of this program and of the shard contract."""
    from importlib.metadata import version as installed

    from tgi_patches.contract import OVERLAY_VERSION, PROTOCOL_VERSION

    typer.echo(f"tgi-orchestrator {installed('tgi-orchestrator')}")
    typer.echo(f"protocol {PROTOCOL_VERSION}, overlay {OVERLAY_VERSION}")


def main() -> None:
    """Entry point of `tgi-orchestrator` and `tgio`."""
    app()


if __name__ == "__main__":
    main()
