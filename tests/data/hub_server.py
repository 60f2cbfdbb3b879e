"""A stand-in for the Hugging Face hub on 127.0.0.1: as much of its protocol as it takes to read data sets."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_token_of_the_tests"

GIT_BYTES = 1000
"""Larger files are not kept by git itself, so that the hub names another hash of them."""


@cache
def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass
class Repository:
    """A data set: the files of its main branch, and of others."""

    files: dict[str, bytes]
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False
    former_name: str | None = None

    def commits(self) -> dict[str, dict[str, bytes]]:
        """The files by names of branches and of commits."""
        named = {"main": self.files, **self.branches}
        return named | {self.commit(files): files for files in named.values()}

    @staticmethod
    def commit(files: dict[str, bytes]) -> str:
        return git_hash("".join(f"{path} {git_hash(files[path])}\n" for path in sorted(files)).encode())

    @property
    def sha(self) -> str:
        return self.commit(self.files)


@dataclass
class Request:
    """What was asked for, and how many bytes of a body were sent."""

    method: str
    path: str
    sent: int = 0

    def is_data(self, suffix: str) -> bool:
        return self.method == "GET" and self.path.endswith(suffix)


Fault = Callable[[Request], "int | str | None"]
"""What becomes of a request: a status to answer with, cut (in the middle of the body), swap (the bytes of it), None."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, *args: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # which is a reader that has gone away
            super().handle_error(*args)


class Hub:
    """The server; it runs inside `with Hub() as hub:`.

    Attributes:
        requests: All since the last `reset`.
        strange: The paths of all that have nothing to do with data sets.
        fault: Asked about every request.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.strange: set[str] = set()
        self.fault: Fault = lambda request: None
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add(self, name: str, files: dict[str, bytes], **options: Any) -> Repository:
        self.repositories[name] = Repository(files, **options)
        return self.repositories[name]

    def reset(self) -> None:
        """Forget requests and faults, keep the repositories."""
        self.requests.clear()
        self.fault = lambda request: None

    def sent(self, suffix: str = "") -> int:
        """Bytes sent of what ends so."""
        return sum(request.sent for request in self.requests if request.path.endswith(suffix))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.asked = Request(self.command, urlsplit(self.path).path)
                hub.requests.append(self.asked)
                self.fault = hub.fault(self.asked)
                if isinstance(self.fault, int):
                    return self.answer(self.fault, b"stumbled")
                for name, repository in hub.repositories.items():
                    for known in (name, repository.former_name):
                        for kind in ("api/datasets", "datasets"):
                            before, inside, rest = self.asked.path.partition(f"/{kind}/{known}")
                            if not before and inside and rest[:1] in ("", "/"):
                                if known == name:
                                    return self.serve(name, repository, rest)
                                return self.answer(307, b"", {"Location": self.path.replace(str(known), name, 1)})
                if "/datasets/" in self.asked.path:
                    return self.error(401, "RepoNotFound")
                hub.strange.add(self.asked.path)
                self.answer(404, b"there is nothing here")

            do_HEAD = do_GET

            def serve(self, name: str, repository: Repository, rest: str) -> None:
                match = re.fullmatch("(?:/(resolve|revision|tree)/([^/]+)(?:/(.+))?)?", rest)
                if match is None:
                    return self.answer(404, b"there is nothing here")
                kind, path = match[1] or "revision", unquote(match[3] or "")
                files = repository.commits().get(unquote(match[2] or "main"))
                if kind == "resolve" and repository.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    return self.error(401, "GatedRepo")
                if files is None:
                    return self.error(404, "RevisionNotFound")
                if kind == "resolve":
                    self.file(files, path)
                elif kind == "tree":
                    self.tree(files, path)
                else:
                    self.json(
                        {
                            "id": name,
                            "sha": repository.commit(files),
                            "gated": "auto" if repository.gated else False,
                            "private": False,
                            "downloads": 0,
                            "likes": 0,
                            "tags": [],
                            "siblings": [{"rfilename": path} for path in sorted(files)],
                        }
                    )

            def tree(self, files: dict[str, bytes], path: str) -> None:
                entries: list[dict[str, Any]] = []
                parts = [path.split("/")[:-1] for path in files]
                for directory in {"/".join(part[: depth + 1]) for part in parts for depth in range(len(part))}:
                    entries.append({"type": "directory", "path": directory, "size": 0, "oid": "0" * 40})
                for name, data in files.items():
                    entries.append({"type": "file", "path": name, "size": len(data), "oid": git_hash(data)})
                    if len(data) > GIT_BYTES:
                        sha256 = hashlib.sha256(data).hexdigest()
                        entries[-1]["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 130}
                        entries[-1]["oid"] = git_hash(sha256.encode())  # of what git keeps in its place
                inside = f"{path}/" if path else ""
                entries = [entry for entry in entries if entry["path"].startswith(inside)]
                if path and not entries:
                    return self.error(404, "EntryNotFound")
                if parse_qs(urlsplit(self.path).query).get("recursive") != ["true"]:
                    entries = [entry for entry in entries if "/" not in entry["path"].removeprefix(inside)]
                self.json(sorted(entries, key=lambda entry: entry["path"]))

            def file(self, files: dict[str, bytes], path: str) -> None:
                data = files.get(path)
                if data is None:
                    return self.error(404, "EntryNotFound")
                headers = {"X-Repo-Commit": Repository.commit(files), "ETag": f'"{git_hash(data)}"'}
                wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                if wanted is None:
                    return self.answer(200, data, headers)
                first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                self.answer(206, data[first : last + 1], headers)

            def json(self, value: Any) -> None:
                self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

            def error(self, status: int, code: str) -> None:
                self.answer(status, b"{}", {"X-Error-Code": code})

            def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for key, value in (headers or {}).items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "HEAD":
                    return
                if self.fault == "cut":
                    body = body[: len(body) // 2]
                    self.close_connection = True
                elif self.fault == "swap":
                    body = body.swapcase()
                self.wfile.write(body)
                self.asked.sent = len(body)

        return Handler
