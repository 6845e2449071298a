"""Images from addresses: only from public ones, never more or longer than said, and no secret of an address in a message."""

from __future__ import annotations

import gzip
import ipaddress
import logging
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import refusing
from hypothesis import given
from hypothesis import strategies as st

from xcompat import XcompatError
from xcompat.data.images import UnusableSampleError
from xcompat.retrieval import fetching
from xcompat.retrieval.fetching import fetch, is_public, shown_address
from xcompat.retrieval.pipeline import as_image

PRIVATE = [
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16",
    "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4", "::/128", "::1/128", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8",
]  # fmt: skip
PUBLIC = ["1.1.1.0/24", "8.8.0.0/16", "93.184.0.0/16", "2606:4700::/32"]
CARRIERS = ["::ffff:0:0", "::", "64:ff9b::", "64:ff9b:1::"]  # IPv4 in the last four bytes: mapped, compatible, NAT64


class Site(ThreadingHTTPServer):
    """A server on loopback that answers each path as a function says, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

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
        return f"http://127.0.0.1:{self.port}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))
        self.server.pages[self.path.partition("?")[0]](self)


@pytest.fixture
def site() -> Iterator[Site]:
    server = Site()
    yield server
    server.shutdown()
    server.server_close()


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


def test_a_rebound_name_is_not_asked_again(site: Site, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that changes its address after it was looked at, as in DNS rebinding, is not asked a second time."""
    monkeypatch.setattr(fetching, "is_public", lambda address: address == "127.0.0.1")
    site.serve("/shoe.png", b"a shoe")
    names["photos.example"] = ["127.0.0.1", "127.0.0.2"]
    assert fetch(f"http://photos.example:{site.port}/shoe.png") == b"a shoe"
    assert names["photos.example"] == ["127.0.0.2"]
    assert site.asked[0][1]["Host"] == f"photos.example:{site.port}", "the host is called by its name"
    with pytest.raises(UnusableSampleError, match=r"photos.example \(127.0.0.2\) is not a public address"):
        fetch(f"http://photos.example:{site.port}/shoe.png")


def test_all_addresses_of_a_name_are_looked_at_and_tried(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [path for path, _ in site.asked].count("/shoe.png") == 1
    again = site.serve("/again", status=302, Location="/again")
    with pytest.raises(UnusableSampleError, match="redirected more than 3 times"):
        fetch(again, allow_private_addresses=True)
    assert [path for path, _ in site.asked].count("/again") == 4


def test_passwords_stay_at_home(site: Site, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("default login me password from-netrc\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    names |= {"one.example": ["127.0.0.1"], "two.example": ["127.0.0.1"]}
    site.serve("/shoe.png", b"a shoe")
    site.serve("/moved", status=301, Location=f"http://two.example:{site.port}/shoe.png")
    assert fetch(f"http://me:secret@one.example:{site.port}/moved", allow_private_addresses=True) == b"a shoe"
    assert ["Authorization" in headers for _, headers in site.asked] == [True, False]


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
        fetch(f"http://127.0.0.1:{site.port}/without-end", allow_private_addresses=True)
    assert stopped.wait(60), "the connection is closed"
    packed = site.serve("/packed", gzip.compress(bytes(1 << 20)), Content_Encoding="gzip")
    with pytest.raises(UnusableSampleError, match="sent compressed content"):
        fetch(packed, allow_private_addresses=True)
    assert site.asked[-1][1]["Accept-Encoding"] == "identity"


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
        fetch(f"http://127.0.0.1:{site.port}/slow", allow_private_addresses=True)
    assert given_up.wait(60), "the connection is closed"


def test_no_secret_of_an_address_is_said(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    secrets = ("hunter2", "s3cr3t", "sign4ture", "fr4gment")
    site.serve("/missing", status=404)
    site.serve("/text", b"no image")
    site.serve("/moved", status=302, Location="/missing?X-Amz-Signature=sign4ture")
    hosts = [(f"127.0.0.1:{site.port}", True), ("127.0.0.1:9", True), ("127.0.0.1:9", False), ("no such host", True), ("[", True)]
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
