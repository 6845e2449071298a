"""A Hub on loopback: enough of its protocol for huggingface_hub to push to and pull from, and faults on request."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import huggingface_hub
import transformers
import yaml

CHANGED = "2026-01-31T12:00:00.000Z"
REPO = r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)"


@dataclass
class Repository:
    """Commits in order, each with its files; a branch is the name of a commit."""

    private: bool = False
    gated: str | bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        sha = hashlib.sha1(f"{len(self.commits)}{sorted(files.items())}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits.get(self.resolve(revision) or "", {})

    def card(self, revision: str = "main") -> Any:
        readme = self.files(revision).get("README.md", b"").decode()
        return yaml.safe_load(readme.split("---")[1]) if readme.startswith("---") else None

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


class Loopback(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Hub(Loopback):
    """Repositories in memory, what was asked of them, and what is to go wrong.

    ``faults`` maps a regular expression on "METHOD path" to a status code, or to 0 for a dropped connection; each strikes as
    often as ``strikes`` says, or for ever. ``spoilt`` maps one on the name of a file to what is wrong with its content: it is
    ``short`` of what was announced, or has ``moved`` on, with another ETag, since it was asked about.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.repos: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.faults: dict[str, int] = {}
        self.strikes: dict[str, int] = {}
        self.spoilt: dict[str, str] = {}
        self.token: str | None = None
        self.is_full = False
        self.datasets: set[str] = set()
        self.page = 100

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def add(self, repo: str, folder: str | Path, branch: str = "main") -> str:
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return self.repos.setdefault(repo, Repository()).commit(files, branch)

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        return self.repos[repo].files(revision)

    def fault(self, asked: str) -> int | None:
        for pattern, status in self.faults.items():
            if re.search(pattern, asked) and self.strikes.get(pattern, 1) > 0:
                if pattern in self.strikes:
                    self.strikes[pattern] -= 1
                return status
        return None


class _MissingError(Exception):
    """What is asked for is not there, and the answer says so."""


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # which waits for the other side between headers and body

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _dispatch(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = f"{self.command} {path}"
        self.server.asked.append(asked)
        status, shown = self.server.fault(asked), self.headers.get("Authorization")
        if status == 0:
            self.close_connection = True
            self.connection.close()
        elif status is not None:
            self._answer(status, {"error": f"the server says {status}"})
        elif self.server.token and not (path.startswith("/large/") or shown == f"Bearer {self.server.token}"):
            self._answer(401, {"error": "Invalid credentials in Authorization header"}, code="RepoNotFound")
        else:
            for pattern, name in _ROUTES:
                if found := re.fullmatch(pattern, asked):
                    with suppress(_MissingError):
                        getattr(self, name)(body, **found.groupdict())
                    return
            self._answer(404, {"error": f"no such route: {asked}"})

    do_GET = do_HEAD = do_POST = do_PUT = _dispatch

    def _answer(self, status: int, content: Any = b"", code: str = "", missing: int = 0, **headers: str) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        more = {"X-Error-Code": code} if code else {}
        for name, value in {"Content-Length": str(len(raw) + missing), **more, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def _find(self, repo: str, revision: str) -> tuple[Repository, str]:
        found = self.server.repos.get(repo)
        sha = found.resolve(revision) if found else None
        if found is None or sha is None:
            self._answer(404, {"error": "not found"}, code="RevisionNotFound" if found else "RepoNotFound")
            raise _MissingError
        return found, sha

    def create(self, body: bytes) -> None:
        given = json.loads(body)
        repo = f"{given.get('organization') or 'me'}/{given['name']}"
        answer = {"url": f"{self.server.url}/{repo}", "id": repo}
        if repo in self.server.repos:
            return self._answer(409, answer | {"error": "You already created this model repo"})
        created = self.server.repos[repo] = Repository(private=given.get("visibility") == "private" or bool(given.get("private")))
        created.commit({".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
        return self._answer(200, answer)

    def validate(self, body: bytes) -> None:
        block = json.loads(body)["content"].split("---")[1]
        valid = isinstance(yaml.safe_load(block), dict)
        self._answer(200 if valid else 400, {"errors": [] if valid else [{"message": "no mapping"}], "warnings": []})

    def info(self, body: bytes, repo: str, revision: str = "main") -> None:
        repository, sha = self._find(repo, revision)
        names = [{"rfilename": name} for name in repository.commits[sha]]
        about = {"id": repo, "sha": sha, "siblings": names, "private": repository.private, "gated": repository.gated}
        card = repository.card(sha)
        self._answer(200, about | {"cardData": card, "tags": _tags(card), "downloads": 0, "likes": 0, "lastModified": CHANGED})

    def models(self, body: bytes) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        wanted, start = set(asked.get("filter", [])), int(asked.get("cursor", ["0"])[0])
        tags = {name: _tags(repository.card()) for name, repository in self.server.repos.items()}
        names = [name for name in tags if wanted <= set(tags[name])]
        end = start + self.server.page
        following = {**asked, "cursor": [str(end)]}
        link = {"Link": f'<{self.server.url}/api/models?{urlencode(following, doseq=True)}>; rel="next"'} if names[end:] else {}
        self._answer(200, [{"id": name, "tags": tags[name], "downloads": 0, "likes": 0} for name in names[start:end]], **link)

    def dataset(self, body: bytes, repo: str) -> None:
        there = repo in self.server.datasets
        self._answer(200 if there else 404, {"id": repo, "sha": "0" * 40}, code="" if there else "RepoNotFound")

    def tree(self, body: bytes, repo: str, revision: str, folder: str | None) -> None:
        repository, sha = self._find(repo, revision)
        if folder is not None:  # nothing here has folders
            self._answer(404, {"error": f"{folder} does not exist"}, code="EntryNotFound")
            return
        files = repository.commits[sha].items()
        self._answer(200, [{"type": "file", "path": path, "size": len(raw), "oid": _oid(raw)} for path, raw in files])

    def branch(self, body: bytes, repo: str, revision: str) -> None:
        repository, sha = self._find(repo, "main")
        taken = revision in repository.branches
        repository.branches.setdefault(revision, sha)
        self._answer(409 if taken else 200, {})

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        repository, sha = self._find(repo, revision)
        there = repository.commits[sha]
        answers = []
        for file in json.loads(body)["files"]:
            name = file["path"]
            mode, digest = ("lfs", _sha256) if name.endswith(".safetensors") else ("regular", _oid)
            oid = digest(there[name]) if name in there else None
            answers.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._answer(200, {"files": answers})

    def batch(self, body: bytes, repo: str) -> None:
        objects = []
        for wanted in json.loads(body)["objects"]:
            if self.server.is_full:
                objects.append(wanted | {"error": {"code": 403, "message": "storage limit reached"}})
                continue
            upload = {"upload": {"href": f"{self.server.url}/large/{wanted['oid']}"}}
            objects.append(wanted if wanted["oid"] in self.server.large else wanted | {"actions": upload})
        self._answer(200, {"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        assert _sha256(body) == oid
        self.server.large[oid] = body
        self._answer(200)

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        repository, sha = self._find(repo, revision)
        files = dict(repository.commits[sha])
        for line in body.splitlines():
            kind, value = (item := json.loads(line))["key"], item["value"]
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif kind == "deletedFile":
                del files[value["path"]]
        sha = repository.commit(files, revision)
        self._answer(200, {"success": True, "commitOid": sha, "commitUrl": f"{self.server.url}/{repo}/commit/{sha}"})

    def resolve(self, body: bytes, repo: str, revision: str, file: str) -> None:
        repository, sha = self._find(repo, revision)
        content = repository.commits[sha].get(file)
        if repository.gated:
            self._answer(403, {"error": "Access to this model is restricted"}, code="GatedRepo", X_Repo_Commit=sha)
        elif content is None:
            self._answer(404, {"error": "Entry not found"}, code="EntryNotFound", X_Repo_Commit=sha)
        else:
            spoilt = next((kind for pattern, kind in self.server.spoilt.items() if re.search(pattern, file)), "")
            if spoilt == "moved" and self.command == "GET":
                content = content[::-1]
            headers = {"X_Repo_Commit": sha, "ETag": f'"{_oid(content)}"'}
            if spoilt == "short" and self.command == "GET":
                self.close_connection = True
                self._answer(200, content[: len(content) // 2], missing=len(content) - len(content) // 2, **headers)
            else:
                self._answer(200, content, **headers)


def _tags(card: Any) -> list[str]:
    return [str(tag) for tag in card.get("tags") or []] if isinstance(card, dict) else []


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


_ROUTES = [
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "validate"),
    (rf"POST /api/models/{REPO}/preupload/(?P<revision>.+)", "preupload"),
    (rf"POST /api/models/{REPO}/commit/(?P<revision>.+)", "commit"),
    (rf"POST /api/models/{REPO}/branch/(?P<revision>.+)", "branch"),
    (rf"POST /{REPO}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT /large/(?P<oid>\w+)", "put"),
    (rf"GET /api/models/{REPO}/revision/(?P<revision>.+)", "info"),
    (rf"GET /api/models/{REPO}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", "tree"),
    (rf"GET /api/models/{REPO}", "info"),
    (r"GET /api/models", "models"),
    (rf"GET /api/datasets/{REPO}", "dataset"),
    (rf"(?:GET|HEAD) /{REPO}/resolve/(?P<revision>[^/]+|refs/[^/]+/[^/]+)/(?P<file>.+)", "resolve"),
]


@contextmanager
def served(cache: Path) -> Iterator[Hub]:
    """Serve a Hub that this process and those it starts take for the only one, with a folder for what they fetch."""
    hub = Hub()
    with redirected(hub.url, cache):
        try:
            yield hub
        finally:
            hub.close()


@contextmanager
def redirected(url: str, cache: Path) -> Iterator[None]:
    """Let this process, which may have imported its libraries already, and those it starts use another Hub."""
    environment = {
        "HF_ENDPOINT": url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "hf_secret",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    values = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": str(cache),
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        for name, value in values.items():
            stack.enter_context(mock.patch.object(huggingface_hub.constants, name, value))
        stack.enter_context(mock.patch.object(transformers.utils.hub, "_hf_api", None))
        stack.enter_context(mock.patch.object(huggingface_hub.utils._http.time, "sleep"))  # between tries
        yield
