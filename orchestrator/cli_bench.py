"""The options of `bench`; its work is in `commands.bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli_options import Config, Deployment, Dtype, Json, Model, Rounds

bench_app = typer.Typer(help="Measure ratios on this machine.", no_args_is_help=True, rich_markup_mode=None)


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


@bench_app.command("scheduler")
def bench_scheduler(
    config: Config = None,
    model: Model = None,
    dtype: Dtype = "int8",
    part: Annotated[
        list[str] | None,
        typer.Option(help="queue, conductor, lengths, burst or break-even; may be repeated."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="At most 90 s in place of four minutes.")] = False,
    million: Annotated[bool, typer.Option("--million", help="Memory over a million tickets.")] = False,
    costs: Annotated[
        Path | None, typer.Option(help="Simulate with the cost models that a deployment saved in this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What scheduling costs a client and the conductor, and what it buys."""
    from orchestrator.bench.scheduler.run import PARTS, Wanted
    from orchestrator.commands import bench
    from orchestrator.commands.common import settings_of

    flags = {"model.id": model, "model.dtype": dtype}
    pair = {"shards.prefill.count": 1, "shards.decode.count": 1, "shards.mixed.count": 0}
    wanted = Wanted(tuple(part or PARTS), quick, million, costs)
    bench.bench_scheduler(settings_of(config, {**flags, **pair}), wanted, as_json=as_json)


@bench_app.command("control")
def bench_control(
    shards: Annotated[int, typer.Option(min=1, max=2000, help="How many are kept.")] = 200,
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure.")] = 20.0,
    as_json: Json = False,
) -> None:
    """CPU time of a conductor that only keeps shards, as a share of a core."""
    from orchestrator.commands import bench

    bench.bench_control(shards=shards, seconds=seconds, as_json=as_json)
