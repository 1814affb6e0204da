"""Options that several commands have in common, as typer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
Rounds = Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")]
