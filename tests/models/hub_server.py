"""A hub on the loopback that speaks as much of the Hugging Face hub's API as fetching a snapshot needs; its cache."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit


def _oid(data: bytes) -> str:
    """A name of the length that git's have."""
    return hashlib.sha256(data).hexdigest()[:40]


COMMIT = _oid(b"first")


def make_cached(cache: Path, files: dict[str, bytes]) -> Path:
    """What huggingface_hub leaves of `acme/tiny` in `cache`: blobs, and a snapshot of links to them."""
    repository = cache / "models--acme--tiny"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, (name, data) in enumerate(files.items()):
        (repository / "blobs" / f"{number:040x}").write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


class HubServer:
    """Serves one repository `acme/tiny` with the branch main, the tag v1 and one commit.

    Others do not exist; `acme/gated` has files that need a token which is let in, `acme/private` does not show itself.
    `requests` are the paths asked for; `stalled` holds back the weights until it is set.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.requests: list[str] = []
        self.authorizations: set[str] = set()
        self.stalls = False
        self.asked_for_weights = threading.Event()
        self._released = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        # It looks so often, in seconds, whether it is to end.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        parts = path.strip("/").removeprefix("api/models/").split("/")
        if len(parts) < 4:
            return self._error(request, 404, "", "what the library asks besides is of no interest")
        self.requests.append(path)
        self.authorizations.add(request.headers.get("Authorization", ""))
        repo_id, action, revision = "/".join(parts[:2]), parts[2], parts[3]
        if repo_id == "acme/private":
            return self._error(request, 401, "", "Invalid username or password.")
        if repo_id not in ("acme/tiny", "acme/gated"):
            return self._error(request, 404, "RepoNotFound", "Repository not found")
        if revision not in ("main", "v1", COMMIT):
            return self._error(request, 404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if action == "revision":
            siblings = [{"rfilename": name} for name in self.files]
            return self._json(request, {"id": repo_id, "modelId": repo_id, "sha": COMMIT, "siblings": siblings})
        if action == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                for name, data in self.files.items()
            ]
            return self._json(request, tree)
        if repo_id == "acme/gated":
            return self._error(request, 403, "GatedRepo", "Access to model acme/gated is restricted")
        self._file(request, "/".join(parts[4:]))

    def _file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        data = self.files[name]
        headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": COMMIT}
        if self.stalls and name.endswith(".safetensors") and request.command == "GET":
            self.asked_for_weights.set()
            self._released.wait()
        self._send(request, 200, data, headers)

    def _json(self, request: BaseHTTPRequestHandler, value: object) -> None:
        self._send(request, 200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, request: BaseHTTPRequestHandler, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(request, status, json.dumps({"error": message}).encode(), headers)

    def _send(self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)
