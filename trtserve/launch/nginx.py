"""A reverse proxy in front of several instances: a complete configuration for nginx, that needs no root."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trtserve.triton.server import Address, client_host

HTTP_PORT = 8080
GRPC_PORT = 8081

_TEMPLATE = """\
# Written by `trtserve start --instances {count}`. Run it: nginx -e stderr -p {folder} -c {file}
# Every request goes to the instance with the fewest open ones. A `stop` request knows nothing of the instance that
# its id runs on: cancel by closing the connection, or send both to one instance's own port.
daemon off;
pid "{folder}/pid";
error_log stderr;
worker_processes auto;
events {{
    worker_connections 4096;
}}
http {{
    access_log off;
    client_body_temp_path "{folder}/body";
    proxy_temp_path "{folder}/proxy";
    fastcgi_temp_path "{folder}/fastcgi";
    uwsgi_temp_path "{folder}/uwsgi";
    scgi_temp_path "{folder}/scgi";
    # Logits and adapters are large, answers are slow and come in pieces.
    client_max_body_size 0;
    # A gRPC stream is one request, whose client may be silent while it reads.
    client_body_timeout 1h;
    proxy_buffering off;
    proxy_request_buffering off;
    proxy_http_version 1.1;
    proxy_read_timeout 1h;
    proxy_send_timeout 1h;
    grpc_read_timeout 1h;
    grpc_send_timeout 1h;
    upstream triton_http {{
        least_conn;
{http_servers}
        keepalive 64;
    }}
    upstream triton_grpc {{
        least_conn;
{grpc_servers}
        keepalive 64;
    }}
    server {{
        listen {host}:{http_port};
        location / {{
            proxy_set_header Connection "";
            proxy_pass http://triton_http;
        }}
    }}
    server {{
        listen {host}:{grpc_port} http2;
        location / {{
            grpc_pass grpc://triton_grpc;
        }}
    }}
}}
"""


def proxy_config(
    addresses: Sequence[Address], *, file: Path, http_port: int = HTTP_PORT, grpc_port: int = GRPC_PORT
) -> str:
    """Content of `file`: HTTP and gRPC of all instances behind one port each; its working files go beside it."""
    folder = file.parent
    return _TEMPLATE.format(
        count=len(addresses),
        folder=folder,
        file=file,
        host=addresses[0].host,
        http_port=http_port,
        grpc_port=grpc_port,
        http_servers=_servers([(address.host, address.http_port) for address in addresses]),
        grpc_servers=_servers([(address.host, address.grpc_port) for address in addresses]),
    )


def _servers(places: Sequence[tuple[str, int]]) -> str:
    return "\n".join(f"        server {client_host(host)}:{port} max_fails=1 fail_timeout=5s;" for host, port in places)
