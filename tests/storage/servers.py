"""Servers of tests: S3 by moto, HTTP that serves ranges, and a proxy that cuts connections."""

from __future__ import annotations

import re
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest


class Bucket:
    """A bucket of a server of S3 behind a proxy."""

    def __init__(self, client: Any, proxy: CuttingProxy) -> None:
        self.client, self.proxy = client, proxy

    def put(self, folder: Path, prefix: str) -> str:
        """Store all files of a folder under a prefix, and return its URL."""
        for path in folder.rglob("*"):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(folder).as_posix()}"
                self.client.put_object(Bucket="bucket", Key=key, Body=path.read_bytes())
        return f"s3://bucket/{prefix}"

    def files(self, prefix: str) -> dict[str, bytes]:
        """Return the content of every object under a prefix, by name."""
        found = self.client.list_objects_v2(Bucket="bucket", Prefix=f"{prefix}/").get("Contents", [])
        keys = [each["Key"] for each in found]
        read = self.client.get_object
        return {key.removeprefix(f"{prefix}/"): read(Bucket="bucket", Key=key)["Body"].read() for key in keys}


@contextmanager
def s3_bucket(patch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Serve S3 with one bucket, which the environment names to s3fs; requests go through a proxy."""
    import boto3
    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.setenv(name, "testing")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
    client.create_bucket(Bucket="bucket")
    with CuttingProxy((host, port)) as proxy:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield Bucket(client, proxy)
    server.stop()


class CuttingProxy:
    """Passes bytes on to an address, and cuts connections after as many bytes of answers as `cuts` lists."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self.cuts: list[int] = []
        self.done = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                asking = self._listening.accept()[0]
                threading.Thread(target=self._pass_on, args=(asking,), daemon=True).start()

    def _pass_on(self, asking: socket.socket) -> None:
        with asking, socket.create_connection(self._address) as answering, suppress(OSError):
            while True:
                for ready in select.select([asking, answering], [], [])[0]:
                    data = ready.recv(2**14)
                    if not data:
                        return
                    if ready is asking:
                        answering.sendall(data)
                        continue
                    if self.cuts:
                        part = data[: self.cuts[0]]
                        self.cuts[0] -= len(part)
                        asking.sendall(part)
                        if self.cuts[0] == 0:
                            self.cuts.pop(0)
                            self.done += 1
                            return
                    else:
                        asking.sendall(data)


class RangeServer:
    """Serves the files of a folder; it ends as many answers early as `cuts` lists, after as many bytes."""

    def __init__(self, root: Path) -> None:
        self.cuts: list[int] = []
        self.starts: list[int] = []
        """First bytes of the ranges that were asked for, in order."""
        self.serves_ranges = True
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def _answer(self, with_body: bool) -> None:
                path = root / self.path.lstrip("/")
                if not path.is_file():
                    self.send_error(404)
                    return
                content = path.read_bytes()
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                start, stop = 0, len(content)
                if wanted and outer.serves_ranges:
                    start, stop = int(wanted[1]), min(int(wanted[2]) + 1, stop)
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
                else:
                    self.send_response(200)
                self.send_header("ETag", f'"{hash(content)}"')
                self.send_header("Content-Length", str(stop - start))
                self.end_headers()
                if not with_body:
                    return
                outer.starts.append(start)
                body = content[start:stop]
                if outer.cuts:
                    body = body[: outer.cuts.pop(0)]
                    self.close_connection = True
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
