"""Shards and texts elsewhere: read from the web, object stores, the Hub and commands; broken off, missing, refused."""

from __future__ import annotations

import gzip
import io
import json
import re
import tempfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import refuses
from hub_server import Loopback, redirected
from rich.console import Console
from test_loading import png, write_shard

from xcompat.core import progress
from xcompat.data import CorpusSource, PairSource, load_pairs, load_texts
from xcompat.data.addresses import ALLOW_PIPES, list_addresses
from xcompat.data.cache import cache_folder
from xcompat.training.input_checks import check_paths
from xcompat.training.stage_recipe import StageRecipe


class Store(Loopback):
    """Files at addresses, with ranges; the first ``breaks`` answers stop in the middle."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.files: dict[str, bytes] = {}
        self.breaks = 0


class _Handler(BaseHTTPRequestHandler):
    server: Store
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        content, status = self.server.files.get(path), re.fullmatch(r"/status/(\d+)/.*", path)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if path.startswith("/api/"):  # what the Hub says of a data set
            held = self.server.files.items()
            files = [{"type": "file", "path": Path(name).name, "size": len(raw), "oid": "0"} for name, raw in held]
            self._send(200, json.dumps(files if "/tree/" in path else {"id": "me/photos", "sha": "0" * 40}).encode())
        elif status is not None or content is None:
            self._send(int(status[1]) if status else 404, b"")
        elif asked is None or path.startswith("/whole/"):  # whatever part is asked for
            self._send(200, content)
        else:
            first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            self._send(206, content[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(content)}"})

    do_GET = do_HEAD = _answer

    def _send(self, status: int, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(body)), "Accept-Ranges": "bytes", "ETag": '"0"', "X-Repo-Commit": "0" * 40}
        for name, value in (headers | (more or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if len(body) > 1000 and self.server.breaks:
            self.server.breaks -= 1
            body, self.close_connection = body[: len(body) // 2], True
        self.wfile.write(body)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    server = Store()
    for key in ("STREAMING_READ_RETRY_INTERVAL", "STREAMING_OPEN_RETRY_INTERVAL"):
        monkeypatch.setattr(datasets.config, key, 0)
    yield server
    server.close()


def shard(number: int, suffix: str = "tar") -> bytes:
    samples = {f"{number}{letter}": {"png": png(number), "txt": f"thing {number}{letter}".encode()} for letter in "ab"}
    with tempfile.TemporaryDirectory() as folder:
        return write_shard(Path(folder, f"a.{suffix}"), samples).read_bytes()


def ids(path: str | list[str], **more: object) -> list[str]:
    return [row["id"] for row in load_pairs(PairSource(path=path, streaming=True, **more))]


@pytest.mark.parametrize("breaks", [0, 1])
def test_shards_of_the_web_are_streamed_and_continued_where_a_connection_broke(store: Store, breaks: int) -> None:
    store.files = {"/0.tar": shard(0), "/1.tar": shard(1), "/2.tgz": shard(2, "tar.gz")}
    store.breaks = breaks
    found = ids([f"http://{store.host}/{{0..1}}.tar?token=secret", f"http://{store.host}/2.tgz"])
    assert found == ["0a", "0b", "1a", "1b", "2a", "2b"]
    assert store.breaks == 0
    store.files = {"/bucket/0.tar": shard(0)}
    bucket = f"s3://key:secret@bucket/0.tar?scheme=http&region=here&endpoint_override={store.host}"
    assert ids(bucket) == ["0a", "0b"], "as of an object store"


def test_missing_and_cut_shards_count_as_bad(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.files = {f"/{number}.tar": shard(number) for number in (0, 2)}
    path = f"http://{store.host}/{{0..2}}.tar?token=secret"
    assert ids(path, max_bad_share=0.4) == ["0a", "0b", "2a", "2b"]
    said = " ".join(capsys.readouterr().out.split())
    assert "skipped 1 of 3 shards" in said and "/1.tar: it does not exist" in said and "secret" not in said
    assert "secret" not in refuses("1 of 3 shards cannot be read", ids, path)
    store.files = {"/0.tar": shard(0)[:-9000].rstrip(b"\0")[:2048]}  # up to the end of a member
    refuses(r"/0\.tar: (cut short|.*ReadError)", ids, f"http://{store.host}/0.tar")


def test_shards_of_the_hub(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://{store.host}")
    store.files = {f"/datasets/me/photos/resolve/main/{number}.tar": shard(number) for number in (0, 1)}
    with redirected(f"http://{store.host}", tmp_path):
        assert ids("hf://datasets/me/photos/*.tar") == ["0a", "0b", "1a", "1b"]
        assert ids("hf://datasets/me/photos/{1..1}.tar") == ["1a", "1b"]


def test_a_command_runs_where_the_environment_allows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0.tar").write_bytes(shard(0))
    command = f"pipe:touch {tmp_path}/ran; cat {tmp_path}/0.tar"
    stage = StageRecipe(method="xbt", data={"pairs": {"path": command, "streaming": True}})
    for refused in (lambda: check_paths(stage), lambda: ids(command), lambda: corpus(command)):
        refuses(f"pipe:touch .* runs a command on this machine; set {ALLOW_PIPES}=1", refused)
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv(ALLOW_PIPES, "1")
    assert check_paths(stage) == ["pipe:touch ... (1 remote)"]
    assert ids(command) == ["0a", "0b"] and (tmp_path / "ran").exists()
    assert ids(command, limit=1) == ["0a"]
    texts = StageRecipe(method="projection", data={"texts": [{"path": "pipe:printf text # x.txt"}]})
    for fails, said in (
        (lambda: ids(f"pipe:cat {tmp_path}/0.tar; exit 3"), r"pipe:cat \.\.\.: the command ended with 3"),
        (
            lambda: corpus("pipe:printf text; exit 3", format="text"),
            r"pipe:printf \.\.\. cannot be read: the command ended with 3",
        ),
        (lambda: corpus("pipe:printf text"), r"^pipe:printf \.\.\. is a command; set format to the format of its output"),
        (lambda: check_paths(texts), r"data\.texts\.0\.path: pipe:printf \.\.\. is a command; set format to the format"),
    ):
        refuses(said, fails)


def test_what_is_not_streamed_is_no_address(store: Store) -> None:
    address, message = f"http://me:secret@{store.host}/0.tar?token=secret", r"/0\.tar is remote: only data.texts and pairs with"
    assert "secret" not in refuses(message, load_pairs, address)
    refuses(r"here\.tar is local and http://.* is remote", ids, ["here.tar", f"http://{store.host}/0.tar"])
    assert not store.asked


TEXTS = [f"a thing of kind {number * 7919 % 10_007}" for number in range(600)]  # of more than 1,000 bytes when packed


def corpus(path: str | list[str], **more: object) -> list[str]:
    return load_texts(CorpusSource(path=path, **more))["text"][:]


LINES, PARQUET = "\n".join(TEXTS).encode(), io.BytesIO()
pq.write_table(pa.table({"text": TEXTS}), PARQUET)
FORMS = {
    "texts.txt": LINES,
    "texts.txt.gz": gzip.compress(LINES),
    "texts.jsonl": "\n".join(json.dumps({"text": text}) for text in TEXTS).encode(),
    "texts.parquet": PARQUET.getvalue(),
}


@pytest.mark.parametrize("breaks", [0, 1])
@pytest.mark.parametrize("name", FORMS)
def test_texts_of_the_web_are_read_once(name: str, breaks: int, store: Store) -> None:
    store.files = {f"/{name}": FORMS[name]}
    store.breaks = breaks
    path = f"http://{store.host}/{name}?token=secret"
    assert corpus(path) == TEXTS and store.breaks == 0
    store.asked.clear()
    assert corpus(path) == TEXTS and not store.asked, "kept under its address"
    assert not list(cache_folder().glob(".fetched*")), "the copy is gone"


def test_texts_of_places_shards_and_commands(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.files = {"/0.tar": shard(0), "/1.tar": shard(1), "/bucket/a.txt": b"in a bucket"}
    captions = [f"thing {number}{letter}" for number in (0, 1) for letter in "ab"]
    web = f"http://{store.host}/{{0..1}}.tar"
    assert corpus(web) == captions
    bucket = f"s3://key:secret@bucket/a.txt?scheme=http&region=here&endpoint_override={store.host}"
    assert corpus([web, bucket]) == [*captions, "in a bucket"]
    pairs = PairSource(path=web, streaming=True, limit=3)
    (tmp_path / "here.txt").write_text("here\n")
    assert load_texts([pairs, str(tmp_path / "here.txt")])["text"][:] == [*captions[:3], "here"]
    monkeypatch.setenv(ALLOW_PIPES, "1")
    assert corpus("pipe:printf 'of a command'", format="text") == ["of a command"]
    stage = StageRecipe(method="projection", data={"texts": [{"path": web}]})
    assert check_paths(stage) == [f"http://{store.host}/0.tar (2 remote)"]
    monkeypatch.setenv(ALLOW_PIPES, "1")
    assert corpus(r"pipe:printf 'a\nb\n'", format="text") == ["a", "b"]
    assert corpus("pipe:echo c d | awk '{print $2, $1}'", format="text") == ["d c"]
    expanded = [f"pipe:cat 0{number}.tar | tee {{a,b}}" for number in (7, 8, 9)]
    assert list_addresses("pipe:cat {07..09}.tar | tee {a,b}") == expanded


@pytest.mark.parametrize(
    ("address", "more", "message"),
    [
        ("{web}/gone.txt?secret", {}, r"http://\S+/gone\.txt cannot be read: it does not exist"),
        ("{web}/status/403/x.txt?secret", {}, r"/x\.txt cannot be read: its server answers 403"),
        ("{web}/status/503/x.tar?secret", {}, r"/x\.tar: its server answers 503; the corpus is not cached"),
        ("{web}/texts.parquet?secret", {"text_column": "title"}, r"http://\S+/texts\.parquet.*title"),
        ("{web}/damaged.txt.gz?secret", {}, r"http://\S+/damaged\.txt\.gz cannot be read after line \d+"),
        ("{web}/texts.txt?secret", {"format": "datasets"}, "format: datasets does not work with the address http://"),
        ("{web}/texts.txt?secret", {"split": "train"}, "split"),
        ("{web}/whole/x.txt?secret", {}, r"/x\.txt cannot be read: its server does not support HTTP range requests"),
        ("https://me:secret@host/{{a?secret", {}, r"https://host/\{a is not a valid address; check the scheme and the braces"),
        ("https://[bad/0.txt?secret", {}, r"https://\[bad/0\.txt is not a valid address"),
        ("https:///0.txt?secret", {}, "https:///0.txt is not a valid address"),
        ("pipe: ", {}, "pipe: contains no command"),
        ("hf://datasets/me*?/*.txt?secret", {}, "hf://datasets/me.* cannot be looked up"),
        ("http://127.0.0.1:1/x.txt?secret", {}, r"http://127\.0\.0\.1:1/x\.txt cannot be read: its server cannot be reached"),
    ],
)
def test_unreadable_texts_are_named_without_secrets(address: str, more: dict[str, str], message: str, store: Store) -> None:
    store.files = {f"/{each}": held for each, held in FORMS.items()} | {"/damaged.txt.gz": FORMS["texts.txt.gz"][:-40]}
    store.files["/whole/x.txt"] = b"a line\n" * 1_000_000  # more than fsspec asks for at once
    line = refuses(message, corpus, address.format(web=f"http://{store.host}"), **more)
    assert not any(word in line for word in ("secret", "me:", "fetched"))


def test_what_a_killed_process_fetched_is_removed_by_the_next(store: Store) -> None:
    store.files = {"/texts.txt": LINES}
    left = cache_folder() / ".fetched.abcdefgh.xcompat-partial"
    left.mkdir()
    (left / "texts.txt").write_bytes(b"half")
    assert corpus(f"http://{store.host}/texts.txt?{store.host}") == TEXTS
    assert not left.exists()


def test_a_terminal_shows_two_bars_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(progress, "console", terminal)
    store.files = {"/texts.txt": LINES}
    assert corpus(f"http://{store.host}/texts.txt?shown") == TEXTS
    shown = terminal.file.getvalue()
    assert "reading texts" in shown and "600/?" in re.sub(r"\x1b\[[0-9;]*m", "", shown)
