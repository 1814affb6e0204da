"""The command line.  Options stand here, work in `commands`; nothing heavy is imported for `--help`.

Exit codes: 0 ok, 1 a check failed, 2 bad input, 3 unreachable.  Errors are one sentence on stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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
bench_app = typer.Typer(help="Measure ratios on this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")

Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")]
Deployment = Annotated[str | None, typer.Option("--deployment", "-d", help="Name of the deployment.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Url = Annotated[str | None, typer.Option("--url", help="A gateway; the default is the running deployment's.")]
Model = Annotated[str | None, typer.Option("--model", help="Hub id or local folder of a decoder model.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or int8.")]
RedisUrl = Annotated[str | None, typer.Option("--redis", help="Redis URL; the default is an own server.")]
Listen = Annotated[str | None, typer.Option(help="Address of the gateway, such as 127.0.0.1:3000.")]
Workers = Annotated[int | None, typer.Option(min=1, max=64, help="Gateway processes that share the port.")]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", help="Certificate chain (PEM) for HTTPS.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", help="Its private key (PEM).")]
KeysFile = Annotated[Path | None, typer.Option("--keys-file", help="YAML file with named API keys.")]


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
) -> None:
    """Stop the deployment that runs on this machine."""
    from orchestrator.commands.common import deployment_name
    from orchestrator.commands.down import stop_deployment

    stop_deployment(deployment_name(config, deployment), timeout_s=timeout)


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
    from orchestrator.commands.common import deployment_name
    from orchestrator.commands.logs import show_log

    show_log(deployment_name(config, deployment), shard, lines=lines, follow=follow)


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
    reference: Annotated[
        str | None, typer.Option(help="URL of any TGI server with the same model, to compare with.")
    ] = None,
    model: Model = None,
    dtype: Dtype = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest difference of two logprobs; the default is the dtype's.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Also ask all greedy cases, so many at once.")] = 1,
    as_json: Json = False,
) -> None:
    """Prove that the separated pair answers exactly as one shard does."""
    from orchestrator.commands.common import plain_url, settings_of
    from orchestrator.commands.verify import Wanted, run_verify

    loaded = settings_of(config, {"deployment": deployment, "model.id": model, "model.dtype": dtype})
    wanted = Wanted(
        url=plain_url(url) if url else None,
        reference=plain_url(reference) if reference else None,
        tolerance=tolerance,
        concurrency=concurrency,
    )
    run_verify(loaded, wanted, as_json=as_json)


Rounds = Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")]


@bench_app.command("shard")
def bench_shard(
    config: Config = None, model: Model = None, dtype: Dtype = None, rounds: Rounds = 9, as_json: Json = False
) -> None:
    """The embedded shard's engine against a bare transformers loop."""
    from orchestrator.commands import bench
    from orchestrator.commands.common import settings_of

    loaded = settings_of(config, {"model.id": model, "model.dtype": dtype})
    bench.bench_shard(loaded, rounds=rounds, as_json=as_json)


@bench_app.command("bridge")
def bench_bridge(
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="Record size in MiB; may be repeated.")
    ] = None,
    rounds: Rounds = 9,
    as_json: Json = False,
) -> None:
    """A KV record through the arena against memcpy and a safetensors file."""
    from orchestrator.commands import bench

    bench.bench_bridge(sizes_mib=size or (16, 128), rounds=rounds, as_json=as_json)


@bench_app.command("pull")
def bench_pull(
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="Record size in MiB; may be repeated.")
    ] = None,
    rounds: Rounds = 9,
    serve: Annotated[str, typer.Option(help="Be the other host, at HOST:PORT, until interrupted.")] = "",
    peer: Annotated[
        str, typer.Option("--from", help="HOST:PORT of the other host; the default starts one here.")
    ] = "",
    as_json: Json = False,
) -> None:
    """A KV record between hosts against memcpy, a raw socket, gloo and nixl."""
    from orchestrator.commands import bench

    bench.bench_pull(sizes_mib=size or (1, 8, 64), rounds=rounds, serve=serve, peer=peer, as_json=as_json)


@bench_app.command("relay")
def bench_relay(
    config: Config = None,
    deployment: Deployment = None,
    rounds: Rounds = 9,
    requests: Annotated[
        int, typer.Option(min=0, help="Watch memory over so many requests; 0 leaves it out.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """What the separated path adds to the time to first token of the running deployment."""
    from orchestrator.commands import bench
    from orchestrator.commands.common import deployment_name, running_state

    state = running_state(deployment_name(config, deployment))
    bench.bench_relay(state, rounds=rounds, requests=requests, as_json=as_json)


@bench_app.command("gateway")
def bench_gateway(
    rounds: Annotated[int, typer.Option(min=1, max=99, help="Rounds; medians are reported.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter requests.")] = False,
    only: Annotated[str, typer.Option(help="Gateways with commas between, such as ours,aiohttp.")] = "",
    measure: Annotated[
        str, typer.Option(help="Of event, flood, request, ttft, pool and open, with commas between.")
    ] = "",
    route: Annotated[str, typer.Option(help="chat, completions or generate.")] = "chat",
    as_json: Json = False,
) -> None:
    """CPU time per token event and per request against nginx, vllm-router, aiohttp and FastAPI."""
    from orchestrator.commands import bench

    bench.bench_gateway(only=only, measures=measure, rounds=rounds, quick=quick, route=route, as_json=as_json)


@bench_app.command("interference")
def bench_interference(
    config: Config = None,
    model: Model = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or int8.")] = "int8",
    long: Annotated[bool, typer.Option("--long/--quick", help="Eight minutes, or at most 90 s.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for interference.json and .png.")] = None,
    as_json: Json = False,
) -> None:
    """What mixing prefill into decode costs on this machine, and what separation buys."""
    from orchestrator.commands import bench
    from orchestrator.commands.common import settings_of

    bench.bench_interference(
        settings_of(config, {"model.id": model}), long=long, dtype=dtype, out=out, as_json=as_json
    )


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
