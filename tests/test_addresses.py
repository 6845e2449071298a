"""What lies at addresses: shards and texts from the web, object stores, the Hub and commands; images from public ones alone."""

from __future__ import annotations

import gzip
import io
import ipaddress
import json
import logging
import re
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import refuses, refusing
from hub_server import Loopback, redirected
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_loading import png, write_shard

from xcompat import XcompatError
from xcompat.core import progress
from xcompat.data import CorpusSource, PairSource, load_pairs, load_texts
from xcompat.data.addresses import ALLOW_PIPES, list_addresses
from xcompat.data.cache import cache_folder
from xcompat.data.images import UnusableSampleError
from xcompat.retrieval import fetching
from xcompat.retrieval.fetching import fetch, is_public, shown_address
from xcompat.retrieval.pipeline import as_image
from xcompat.training.input_checks import check_paths
from xcompat.training.stage_recipe import StageRecipe


class Store(Loopback):
    """Files at addresses, with ranges; the first ``breaks`` answers stop in the middle."""

    def __init__(self) -> None:
        super().__init__(_FileHandler)
        self.files: dict[str, bytes] = {}
        self.breaks = 0


class _FileHandler(BaseHTTPRequestHandler):
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


PRIVATE = [
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16",
    "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4", "::/128", "::1/128", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8",
]  # fmt: skip
PUBLIC = ["1.1.1.0/24", "8.8.0.0/16", "93.184.0.0/16", "2606:4700::/32"]
CARRIERS = ["::ffff:0:0", "::", "64:ff9b::", "64:ff9b:1::"]  # IPv4 in the last four bytes: mapped, compatible, NAT64


class Site(Loopback):
    """A server that answers each path as a function says, and remembers the headers that it was asked with."""

    def __init__(self) -> None:
        super().__init__(_PageHandler)
        self.pages: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.headers: list[dict[str, str]] = []

    @property
    def port(self) -> int:
        return self.server_address[1]

    def serve(self, path: str, body: bytes = b"", status: int = 200, **headers: str) -> str:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(status)
            for name, value in headers.items():
                handler.send_header(name.replace("_", "-"), value)
            handler.end_headers()
            handler.wfile.write(body)

        self.pages[path] = answer
        return f"http://{self.host}{path}"


class _PageHandler(BaseHTTPRequestHandler):
    server: Site

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.headers.append(dict(self.headers))
        self.server.pages[self.path.partition("?")[0]](self)


@pytest.fixture
def site() -> Iterator[Site]:
    server = Site()
    yield server
    server.close()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return name -> its addresses, of which each look-up takes the next for as long as there are any; no other name resolves."""
    known: dict[str, list[str]] = {}

    def resolve(host: str, port: int | None, *_: Any, **__: Any) -> list[Any]:
        addresses = known.get(host)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses.pop(0), port or 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


@given(st.sampled_from(PRIVATE).flatmap(lambda net: st.ip_addresses(network=net)))
def test_no_private_address_is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    assert not is_public(str(address))


@given(st.sampled_from(PUBLIC).flatmap(lambda net: st.ip_addresses(network=net)))
def test_public_addresses_are(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    assert is_public(str(address))


@given(st.ip_addresses(v=4), st.sampled_from(CARRIERS))
def test_no_address_that_carries_another_is_public(inner: ipaddress.IPv4Address, carrier: str) -> None:
    assert not is_public(str(ipaddress.IPv6Address(int(ipaddress.IPv6Address(carrier)) + int(inner))))
    assert not is_public(str(ipaddress.IPv6Address((0x2002 << 112) + (int(inner) << 80))))  # 6to4


WRITINGS: list[Callable[[ipaddress.IPv4Address], str]] = [
    str,
    lambda ip: str(int(ip)),
    lambda ip: hex(int(ip)),
    lambda ip: "0" + oct(int(ip))[2:],
    lambda ip: ".".join(hex(byte) for byte in ip.packed),
    lambda ip: ".".join("0" + oct(byte)[2:] for byte in ip.packed),
    lambda ip: f"{ip.packed[0]}.{int.from_bytes(ip.packed[1:], 'big')}",
    lambda ip: f"[::ffff:{ip}]",
    lambda ip: f"[64:ff9b::{ip}]",
    lambda ip: f"me:secret@{ip}",
]


@given(st.sampled_from(PRIVATE[:10]).flatmap(lambda net: st.ip_addresses(network=net)), st.sampled_from(WRITINGS))
def test_private_addresses_are_refused(address: ipaddress.IPv4Address, writing: Callable[[ipaddress.IPv4Address], str]) -> None:
    with pytest.raises(UnusableSampleError, match="is not a public address|invalid address"):
        fetch(f"http://{writing(address)}:9/shoe.png")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST", "localhost.", "①②⑦.0.0.1", "127.0.0.1.", "127。0。0。1", "０x7f.1", ""]
)
def test_names_of_this_machine_are_refused(host: str) -> None:
    with pytest.raises(UnusableSampleError, match="is not a public address|invalid address|has no address"):
        fetch(f"http://{host}:9/shoe.png")


def test_names_are_resolved_once(site: Site, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that changes its address after it was looked at, as in DNS rebinding, is not asked a second time."""
    monkeypatch.setattr(fetching, "is_public", lambda address: address == "127.0.0.1")
    site.serve("/shoe.png", b"a shoe")
    names["photos.example"] = ["127.0.0.1", "127.0.0.2"]
    assert fetch(f"http://photos.example:{site.port}/shoe.png") == b"a shoe"
    assert names["photos.example"] == ["127.0.0.2"]
    assert site.headers[0]["Host"] == f"photos.example:{site.port}", "the host is called by its name"
    with pytest.raises(UnusableSampleError, match=r"photos.example \(127.0.0.2\) is not a public address"):
        fetch(f"http://photos.example:{site.port}/shoe.png")


def test_every_address_of_a_name_is_looked_at_and_tried(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve_to(*addresses: str) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    resolve_to("1.1.1.1", "10.0.0.1")
    with pytest.raises(UnusableSampleError, match=r"photos.example \(10.0.0.1\) is not a public address"):
        fetch("http://photos.example/shoe.png")
    site.serve("/shoe.png", b"a shoe")
    resolve_to("127.0.0.2", "127.0.0.1")
    assert fetch(f"http://photos.example:{site.port}/shoe.png", allow_private_addresses=True) == b"a shoe"


def test_a_certificate_belongs_to_the_name(tmp_path: Path, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection goes to an address, and still the name is what TLS asks for and checks."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=photos.example", "-addext", "subjectAltName=DNS:photos.example"]
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *subject]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    site = Site()
    asked_for: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.sni_callback = lambda _, name, __: asked_for.append(name)
    site.socket = context.wrap_socket(site.socket, server_side=True)
    site.serve("/shoe.png", b"a shoe")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    names |= {"photos.example": ["127.0.0.1"], "other.example": ["127.0.0.1"]}
    assert fetch(f"https://photos.example:{site.port}/shoe.png", allow_private_addresses=True) == b"a shoe"
    with pytest.raises(UnusableSampleError, match="CERTIFICATE_VERIFY_FAILED"):
        fetch(f"https://other.example:{site.port}/shoe.png", allow_private_addresses=True)
    assert asked_for == ["photos.example", "other.example"]


def test_redirects_are_looked_at_like_addresses(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.serve("/shoe.png", b"a shoe")
    near = site.serve("/near", status=302, Location="/shoe.png")
    assert fetch(near, allow_private_addresses=True) == b"a shoe"
    monkeypatch.setattr(fetching, "is_public", lambda address: address == "127.0.0.1")
    for target, why in (
        (f"http://127.0.0.2:{site.port}/shoe.png", "127.0.0.2 is not a public address"),
        ("http://169.254.169.254/latest/meta-data", "169.254.169.254 is not a public address"),
        ("//[::1]/shoe.png", "::1 is not a public address"),
        ("file:///etc/passwd", "file is neither http nor https"),
        ("ftp://127.0.0.1/shoe.png", "ftp is neither http nor https"),
        ("http://[", "no address"),
    ):
        with pytest.raises(UnusableSampleError, match=why):
            fetch(site.serve("/far", status=302, Location=target))
    assert site.asked.count("/shoe.png") == 1
    again = site.serve("/again", status=302, Location="/again")
    with pytest.raises(UnusableSampleError, match="redirected more than 3 times"):
        fetch(again, allow_private_addresses=True)
    assert site.asked.count("/again") == 4


def test_passwords_stay_at_home(site: Site, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("default login me password from-netrc\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    names |= {"one.example": ["127.0.0.1"], "two.example": ["127.0.0.1"]}
    site.serve("/shoe.png", b"a shoe")
    site.serve("/moved", status=301, Location=f"http://two.example:{site.port}/shoe.png")
    assert fetch(f"http://me:secret@one.example:{site.port}/moved", allow_private_addresses=True) == b"a shoe"
    assert ["Authorization" in headers for headers in site.headers] == [True, False]


def test_no_more_bytes_than_said_and_none_unpacked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MOST_BYTES", 1 << 20)
    assert len(fetch(site.serve("/whole", bytes(1 << 20)), allow_private_addresses=True)) == 1 << 20
    with pytest.raises(UnusableSampleError, match="more than 1 MiB"):
        fetch(site.serve("/more", bytes((1 << 20) + 1)), allow_private_addresses=True)

    def without_end(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(bytes(1 << 16))
        except OSError:
            stopped.set()

    stopped = threading.Event()
    site.pages["/without-end"] = without_end
    with pytest.raises(UnusableSampleError, match="more than 1 MiB"):
        fetch(f"http://{site.host}/without-end", allow_private_addresses=True)
    assert stopped.wait(60), "the connection is closed"
    packed = site.serve("/packed", gzip.compress(bytes(1 << 20)), Content_Encoding="gzip")
    with pytest.raises(UnusableSampleError, match="sent compressed content"):
        fetch(packed, allow_private_addresses=True)
    assert site.headers[-1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("slow", ["headers", "body"])
def test_no_longer_than_said(slow: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then, faster than any limit between two bytes, for as long as the other side listens."""
    monkeypatch.setattr(fetching, "PATIENCE", 0.3)
    given_up = threading.Event()

    def drop_by_drop(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: " if slow == "headers" else b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while not given_up.wait(0.02):
                handler.wfile.write(b"x")
        except OSError:
            given_up.set()

    site.pages["/slow"] = drop_by_drop
    with pytest.raises(UnusableSampleError, match=r"longer than 0.3 seconds"):
        fetch(f"http://{site.host}/slow", allow_private_addresses=True)
    assert given_up.wait(60), "the connection is closed"


def test_no_secret_of_an_address_is_said(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    secrets = ("hunter2", "s3cr3t", "sign4ture", "fr4gment")
    site.serve("/missing", status=404)
    site.serve("/text", b"no image")
    site.serve("/moved", status=302, Location="/missing?X-Amz-Signature=sign4ture")
    hosts = [(site.host, True), ("127.0.0.1:9", True), ("127.0.0.1:9", False), ("no such host", True), ("[", True)]
    for host, allowed in hosts:
        for path in ("missing", "text", "moved"):
            address = f"http://hunter2:s3cr3t@{host}/{path}?X-Amz-Signature=sign4ture&token=s3cr3t#fr4gment"
            with refusing("cannot read the image") as refused:
                as_image(address, allow_private_addresses=allowed)
            assert not [secret for secret in secrets if secret in str(refused.value)]
    with pytest.raises(XcompatError) as refused:
        as_image("http://hunter2:s3/cr3t@photos.example/")
    assert "s3" not in str(refused.value)
    assert site.asked and not [secret for secret in secrets if secret in caplog.text]


@given(*[st.text(st.characters(exclude_characters="/?#\\"), max_size=20)] * 2, st.text(max_size=40))
def test_any_text_has_an_address_to_show(user: str, password: str, rest: str) -> None:
    assert "hunter2" not in shown_address(f"http://hunter2{user}:{password}hunter2@photos.example/{rest}?{rest}hunter2#hunter2")
