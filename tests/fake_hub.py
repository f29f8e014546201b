"""A hub on this machine, and `tiermoe` in a process that uses it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from commands import Outcome
from patience import PATIENCE_S

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """`models`: hub id → folder. `gated`: ids whose files are refused; `broken`: that are
    answered with an error of the server's. `served`: file → bytes of it that went out.
    `lost`: files that are answered with such an error. `cut`: file → bytes after which its
    connection ends and the hub is gone, until `back`."""

    models: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    served: dict[str, int] = field(default_factory=dict)
    gone: bool = False
    url: str = ""
    close: Callable[[], None] = lambda: None

    def back(self) -> None:
        """The connection is there again."""
        self.cut.clear()
        self.gone = False

    def environment(self, home: Path) -> dict[str, str]:
        """Of a process that uses this hub, with a cache of its own in `home`."""
        mine = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        patience = dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), str(PATIENCE_S))
        alone = {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*", "no_proxy": "*"}
        return {**os.environ, **mine, **patience, **alone}


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serves `hub` at `hub.url`, until `hub.close` at the latest."""

    class Handler(_Handler):
        hub_ = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    hub.url, hub.close = f"http://127.0.0.1:{server.server_port}", close
    try:
        yield hub
    finally:
        close()


class _Handler(BaseHTTPRequestHandler):
    hub_: FakeHub

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.hub_.gone:
            self._refuse(503, "")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/tree/[^/]+|/revision/[^/]+)?", path):
            self._about(match[1], tree=(match[2] or "").startswith("/tree"))
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._file(match[1], match[2], body)
        else:
            self._refuse(404, "")

    def _about(self, name: str, tree: bool) -> None:
        if name in self.hub_.broken:
            self._refuse(503, "")
            return
        if name not in self.hub_.models:
            self._refuse(401, "RepoNotFound")
            return
        folder = self.hub_.models[name]
        files = [(str(file.relative_to(folder)), file) for file in sorted(folder.rglob("*")) if file.is_file()]
        if tree:
            listed = [
                {"type": "file", "path": path, "size": file.stat().st_size, "oid": _etag(file)} for path, file in files
            ]
            self._json(listed)
        else:
            siblings = [{"rfilename": path, "size": file.stat().st_size, "blobId": _etag(file)} for path, file in files]
            self._json({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings})

    def _file(self, name: str, path: str, body: bool) -> None:
        file = self.hub_.models.get(name, Path("nowhere")) / path
        if name not in self.hub_.models:
            self._refuse(401, "RepoNotFound")
        elif name in self.hub_.gated:
            self._refuse(403, "GatedRepo")
        elif file.name in self.hub_.lost:
            self._refuse(503, "")
        elif not file.is_file():
            self._refuse(404, "EntryNotFound")
        else:
            self._send(file, body)

    def _send(self, file: Path, body: bool) -> None:
        content = file.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        last = min(int(asked[2]) + 1 if asked and asked[2] else len(content), len(content))
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{_etag(file)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(last - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(content)}")
        self.end_headers()
        if not body:
            return
        cut = self.hub_.cut.get(file.name)
        if cut is not None:
            last, self.hub_.gone = cut, True
        self.wfile.write(content[first:last])
        self.hub_.served[file.name] = self.hub_.served.get(file.name, 0) + last - first

    def _json(self, document: object) -> None:
        content = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


Run = Callable[..., Outcome]


COMMANDS = """
import contextlib, io, json, sys

import huggingface_hub.constants
from tiermoe.cli.main import main

for line in sys.stdin:
    asked = json.loads(line)
    huggingface_hub.constants.HF_HUB_OFFLINE = asked["offline"]
    out, err, sys.argv = io.StringIO(), io.StringIO(), ["tiermoe", *asked["words"]]
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code or 0, out.getvalue(), err.getvalue()]), flush=True)
"""


"""Runs commands, one a line. The hub's address is read when huggingface_hub is imported: this process knows another."""


@contextmanager
def commands_with(hub: FakeHub, home: Path) -> Iterator[Run]:
    """`tiermoe` in a process that uses a hub, with caches of its own in `home`."""
    environment = hub.environment(home) | {"TIERMOE_CACHE": str(home / "tiermoe")}
    line = [sys.executable, "-c", COMMANDS]
    with subprocess.Popen(line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def command(*words: object, offline: bool = False) -> Outcome:
            print(json.dumps({"words": [*map(str, words)], "offline": offline}), file=child.stdin, flush=True)
            return Outcome(*json.loads(child.stdout.readline()))

        yield command
        child.stdin.close()
