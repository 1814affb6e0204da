"""nginx as a plain reverse proxy of the decode shard: one call, no body is read, the floor of a relay."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from orchestrator.bench.gateway.peers.missing import Missing

_CONFIG = """\
daemon off;
worker_processes 1;
worker_rlimit_nofile 65536;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log;
events {{ worker_connections 16384; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000;
  client_body_buffer_size 64k;
  tcp_nodelay on;
  upstream decode {{
    server 127.0.0.1:{decode_port};
    keepalive 512;
    keepalive_requests 1000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://decode;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 60s;
    }}
  }}
}}
"""


def binary() -> str:
    """Raises Missing."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise Missing("install the Debian package nginx-light, or put nginx on PATH")
    return found


def version() -> str:
    """Raises Missing."""
    said = subprocess.run([binary(), "-v"], capture_output=True, text=True, timeout=5, check=False).stderr
    number = re.search(r"nginx/(\S+)", said)
    if number is None:
        raise Missing("`nginx -v` does not say its version")
    return number[1]


def command(port: int, decode_port: int, folder: Path) -> list[str]:
    """Writes the configuration.  Raises Missing."""
    config = folder / "nginx.conf"
    config.write_text(_CONFIG.format(folder=folder, port=port, decode_port=decode_port))
    return [binary(), "-c", str(config), "-e", str(folder / "nginx-error.log")]
