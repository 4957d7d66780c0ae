"""A Kubernetes API that answers what a test gives it, over HTTP: for questions, not for pods that run."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

_KINDS = {403: "Forbidden", 404: "NotFound"}


class Api:
    """``answers``: path -> object, list of objects, or a status; ``denied``: rights that a review refuses."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "/version": {"gitVersion": "v1.31.2", "major": "1", "minor": "31"} | _BUILD
        }
        self.denied: set[str] = set()
        self.asked: list[str] = []

    def answer(self, path: str) -> tuple[int, Any]:
        found = self.answers.get(path, 404)
        if isinstance(found, int):
            message = f"{path.rpartition('/')[2]} is {_KINDS[found].lower()}"
            return found, {"kind": "Status", "status": "Failure", "message": message, "code": found}
        if isinstance(found, list):
            return 200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": found}
        return 200, found

    def review(self, body: dict[str, Any]) -> dict[str, Any]:
        of = body["spec"]["resourceAttributes"]
        name = "/".join(filter(None, [of["resource"], of.get("subresource")]))
        return body | {"status": {"allowed": f"{of['verb']} {name}" not in self.denied}}


_BUILD = {key: "" for key in ("gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler", "platform")}


@contextmanager
def served(api: Api, folder: Path) -> Iterator[Path]:
    """The kubeconfig of a server that answers as ``api`` says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            api.asked.append(self.path)
            self._send(*api.answer(self.path.partition("?")[0].rstrip("/")))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(201, api.review(body))

        def _send(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield kubeconfig(folder / "kubeconfig", server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def kubeconfig(path: Path, port: int) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "users": [{"name": "u", "user": {}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path
