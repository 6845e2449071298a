"""Readers of text files, plain or gzip, with limits: a file of a few kB can unpack to gigabytes."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xcompat.core.errors import XcompatError
from xcompat.core.progress import notice_once
from xcompat.core.surrogates import Surrogates

LONGEST_LINE = 2**24
"""Maximum characters per line. The number of lines is unlimited, as they are streamed."""
LARGEST_TABLE = 2**31
"""Maximum unpacked bytes of a file that is loaded into memory."""
MAX_COMPRESSION_RATIO = 256
"""Maximum compression ratio of a table; text never compresses that well."""
BLOCK = 2**20
SMALL = 64 * BLOCK
"""Files up to this unpacked size can have any compression ratio."""
_DECODERS = (("utf-8", "surrogatepass"), ("cp1252", "strict"), ("utf-8", "ignore"))
DECODING = "replace"
"""Error handler for invalid bytes in tables, as :func:`text_encoding` accepts lone surrogates."""
_SURROGATE_BYTES = re.compile(rb"\xed[\xa0-\xbf]")
UNREADABLE = (OSError, EOFError, zlib.error)
"""Errors of damaged or truncated files."""


def text_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Read the lines of a text file.

    Args:
        file: UTF-8 text; gzip if it ends in ``.gz``.

    Yields:
        The number, from 1, and text of each non-blank line.

    Raises:
        XcompatError: the file is damaged or not UTF-8, or a line exceeds `LONGEST_LINE`.
    """
    replaced = Surrogates()
    try:
        for number, text in _raw_lines(file):
            yield number, replaced.replace_in(text, f"{file} line {number}")
    finally:
        replaced.report()


def _raw_lines(file: Path) -> Iterator[tuple[int, str]]:
    number = 0
    opener = gzip.open if _is_packed(file) else open
    try:
        with opener(file, "rt", encoding="utf-8-sig", errors="surrogatepass") as handle:
            while line := handle.readline(LONGEST_LINE):
                number += 1
                if len(line) == LONGEST_LINE:
                    raise XcompatError(_too_long(f"{file} line {number}"))
                if text := line.strip():
                    yield number, text
    except UnicodeDecodeError:
        raise XcompatError(
            f"{file} is not UTF-8 text near line {number + 1}; convert the file to UTF-8, or remove the line"
        ) from None
    except UNREADABLE as error:
        raise XcompatError(f"{file} cannot be read after line {number} ({error}); fetch it again") from error


def json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the objects of a JSON lines file. Lone surrogates become U+FFFD, with a notice.

    Args:
        file: an object per line; gzip if it ends in ``.gz``.

    Yields:
        The number, from 1, and object of each non-blank line.

    Raises:
        XcompatError: a line is not a JSON object, or :func:`text_lines` cannot read it.
    """
    replaced = Surrogates()
    try:
        for number, line in _raw_lines(file):
            row = _load_json(line)
            if row is None:
                raise XcompatError(f"{file} line {number} is not valid JSON; fix or delete this line")
            if not isinstance(row, dict):
                raise XcompatError(f'{file} line {number} is not a JSON object; write the line as {{"text": ...}}')
            yield number, replaced.replace_in(row, f"{file} line {number}")
    finally:
        replaced.report()


def parse_json(text: str | bytes, where: str = "a JSON value") -> Any:  # noqa: ANN401 - any JSON value
    """Parse JSON; return None if it is invalid, nested too deeply, or has numbers of thousands of digits.

    Lone surrogates become U+FFFD, with a notice.

    Args:
        text: the JSON.
        where: location, for the notice.

    Example:
        >>> parse_json('{"a": 1}'), parse_json("["), parse_json("[" * 100_000), parse_json("1" * 5000)
        ({'a': 1}, None, None, None)
    """
    replaced = Surrogates()
    value = replaced.replace_in(_load_json(text), where)
    replaced.report()
    return value


def _load_json(text: str | bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def require_table(file: Path) -> None:
    """Raise if a table does not fit into memory, before it is read.

    Args:
        file: text; gzip if it ends in ``.gz``.

    Raises:
        XcompatError: it exceeds `LARGEST_TABLE`, `MAX_COMPRESSION_RATIO` or `LONGEST_LINE`.
    """
    size, line = 0, 0
    try:
        with file.open("rb") as packed:
            handle = gzip.GzipFile(fileobj=packed) if _is_packed(file) else packed
            while block := handle.read(BLOCK):
                size += len(block)
                most = LARGEST_TABLE if size <= SMALL else min(LARGEST_TABLE, MAX_COMPRESSION_RATIO * packed.tell())
                if size > most:
                    raise XcompatError(f"{file} has {size:,} bytes or more, too many for a table; split it into several files")
                end = block.find(b"\n")
                line += len(block) if end < 0 else end
                if line > LONGEST_LINE:
                    raise XcompatError(_too_long(str(file)))
                line = line if end < 0 else len(block) - block.rfind(b"\n") - 1
    except UNREADABLE as error:
        raise XcompatError(f"{file} cannot be read ({error}); fetch it again") from error


def first_line(file: Path, encoding: str, errors: str = DECODING) -> str:
    """Return the first line of a text file, without its line end.

    Args:
        file: text; gzip if it ends in ``.gz``.
        encoding: encoding of the text.
        errors: error handler, as in :func:`open`.

    Raises:
        XcompatError: the file is damaged.
    """
    try:
        with (gzip.open if _is_packed(file) else open)(file, "rt", encoding=encoding, errors=errors) as handle:
            return handle.readline(LONGEST_LINE).rstrip("\r\n")
    except (UnicodeDecodeError, *UNREADABLE) as error:
        raise XcompatError(f"{file} cannot be read ({error}); fetch it again") from error


def table_lines(file: Path, encoding: str) -> Iterator[str]:
    """Yield every line of a table, without its line end. Lines above :data:`LONGEST_LINE` come in parts.

    Args:
        file: text; gzip if it ends in ``.gz``.
        encoding: encoding from :func:`text_encoding`.
    """
    with (gzip.open if _is_packed(file) else open)(file, "rt", encoding=encoding, errors=DECODING) as handle:
        while line := handle.readline(LONGEST_LINE):
            yield line.rstrip("\n")


def text_encoding(file: Path) -> str:
    """Detect the encoding of a file: UTF-8, UTF-16 or Windows-1252.

    Windows-1252 needs a file that is not UTF-8 and has no UTF-8 character beyond ASCII.

    Args:
        file: text, with or without byte-order mark; gzip if it ends in ``.gz``.

    Raises:
        XcompatError: no encoding fits, or the file is damaged.
    """
    decoders = [codecs.getincrementaldecoder(name)(errors) for name, errors in _DECODERS]
    utf8 = windows = True
    holds_utf8 = False
    try:
        with (gzip.open if _is_packed(file) else open)(file, "rb") as handle:
            if handle.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                return "utf-16"
            handle.seek(0)
            while block := handle.read(BLOCK):
                found = [_decode_block(decoder, block) for decoder in decoders]
                utf8, windows = utf8 and found[0] is not None, windows and found[1] is not None
                holds_utf8 = holds_utf8 or not (found[2] or "").isascii()
    except UNREADABLE as error:
        raise XcompatError(f"{file} cannot be read ({error}); fetch it again") from error
    if utf8 and _decode_block(decoders[0], b"", final=True) is not None:
        _notice_surrogates(file)
        return "utf-8-sig"
    if holds_utf8 or not windows:
        raise XcompatError(
            f"{file} mixes encodings: parts are not UTF-8 and other parts are not Windows-1252; save the file as UTF-8"
        )
    notice_once(f"{file} is not UTF-8 and is read as Windows-1252; if letters are wrong, save the file as UTF-8")
    return "cp1252"


def _notice_surrogates(file: Path) -> None:
    found = Surrogates()
    with (gzip.open if _is_packed(file) else open)(file, "rb") as handle:
        for number, line in enumerate(iter(lambda: handle.readline(LONGEST_LINE), b""), 1):
            if _SURROGATE_BYTES.search(line):
                found.add(f"{file} line {number}")
    found.report()


def _decode_block(decoder: codecs.IncrementalDecoder, block: bytes, final: bool = False) -> str | None:
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError:
        return None


def _is_packed(file: Path) -> bool:
    return file.suffix.lower() == ".gz"


def _too_long(where: str) -> str:
    return f"{where} has a line of more than {LONGEST_LINE:,} characters; split or delete it"
