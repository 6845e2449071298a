"""Ways to damage a file: what disks, transfers, editors and people do to bytes, to JSON and YAML, and to tables."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

HUGE = (0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 1 << 40, 1 << 31, 0)
HEADER = 256


def damage_file(path: Path, twin: Path, chance: random.Random) -> str:
    """Damage a file in place.

    Args:
        path: the file.
        twin: another file, parts of which get into this one.
        chance: decides all.

    Returns:
        What was done, for people.
    """
    data, other = path.read_bytes(), twin.read_bytes()
    ways: list[Callable[[bytes, bytes, random.Random], tuple[bytes, str]]] = list(BYTES)
    suffix = path.suffix.lower()
    if suffix in (".json", ".jsonl", ".yaml", ".yml"):
        ways = [*ways, *TEXT, *[_tree] * 14]
    elif suffix in (".csv", ".tsv", ".txt"):
        ways = [*ways, *TEXT * 2]
    damaged, how = data, "nothing"
    for _ in range(20):  # a way may do nothing to these bytes
        damaged, how = chance.choice(ways)(data, other, chance)
        if damaged != data:
            break
    path.write_bytes(damaged)
    return how


def _place(data: bytes, chance: random.Random) -> int:
    """Return a place: the head holds what the rest is read by, so every second is there."""
    return chance.randrange(max(1, min(len(data), HEADER) if chance.random() < 0.5 else len(data)))


def _flip(data: bytes, _: bytes, chance: random.Random) -> tuple[bytes, str]:
    place, bit = _place(data, chance), chance.randrange(8)
    changed = bytearray(data or b"\0")
    changed[place] ^= 1 << bit
    return bytes(changed), f"bit {bit} of byte {place} flipped"


def _run_of(value: int) -> Callable[[bytes, bytes, random.Random], tuple[bytes, str]]:
    def fill(data: bytes, _: bytes, chance: random.Random) -> tuple[bytes, str]:
        place, length = _place(data, chance), chance.choice((1, 4, 16, 512, 4096))
        length = min(length, len(data) - place)
        return data[:place] + bytes([value]) * length + data[place + length :], f"{length} bytes from {place} set to {value:#x}"

    return fill


def _random_run(data: bytes, _: bytes, chance: random.Random) -> tuple[bytes, str]:
    place = _place(data, chance)
    length = min(chance.choice((1, 2, 4, 8, 64)), len(data) - place)
    return data[:place] + chance.randbytes(length) + data[place + length :], f"{length} bytes from {place} at random"


def _truncate(data: bytes, _: bytes, chance: random.Random) -> tuple[bytes, str]:
    length = chance.choice((0, _place(data, chance), max(0, len(data) - chance.choice((1, 4, 8, 512)))))
    return data[:length], f"cut off at {length} of {len(data)}"


def _drop(data: bytes, _: bytes, chance: random.Random) -> tuple[bytes, str]:
    place, length = _place(data, chance), chance.choice((1, 4, 64, 512))
    return data[:place] + data[place + length :], f"{length} bytes from {place} taken out"


def _double(data: bytes, _: bytes, chance: random.Random) -> tuple[bytes, str]:
    place, length = _place(data, chance), chance.choice((1, 4, 64, 512))
    return data[: place + length] + data[place:], f"{length} bytes from {place} doubled"


def _insert(data: bytes, _: bytes, chance: random.Random) -> tuple[bytes, str]:
    place, length = _place(data, chance), chance.choice((1, 2, 8, 100))
    return data[:place] + chance.randbytes(length) + data[place:], f"{length} bytes put in at {place}"


def _append(data: bytes, other: bytes, chance: random.Random) -> tuple[bytes, str]:
    more = chance.choice((b"\0" * 8, b"\n", data, other, chance.randbytes(64)))
    return data + more, f"{len(more)} bytes at the end"


def _blow_up(data: bytes, _: bytes, chance: random.Random) -> tuple[bytes, str]:
    size, value = chance.choice((4, 8)), chance.choice(HUGE)
    place = chance.randrange(max(1, min(len(data), HEADER) - size + 1))
    return (
        data[:place] + (value & (2 ** (8 * size) - 1)).to_bytes(size, "little") + data[place + size :],
        f"the {8 * size} bits at {place} set to {value:#x}",
    )


def _swap(data: bytes, other: bytes, chance: random.Random) -> tuple[bytes, str]:
    if chance.random() < 0.5:
        return other, "another's file in its place"
    place = _place(data, chance)
    return data[:place] + other[place:], f"another's bytes from {place}"


def _recode(data: bytes, _: bytes, chance: random.Random) -> tuple[bytes, str]:
    text = data.decode("utf-8", "replace")
    code = chance.choice(("utf-16", "utf-32", "utf-8-sig", "utf-16-be", "cp037"))
    return text.encode(code, "replace"), f"written as {code}"


def _foreign_letters(data: bytes, _: bytes, chance: random.Random) -> tuple[bytes, str]:
    place = _place(data, chance)
    what = chance.choice((b"\0", b"\xe9", b"\xff\xfe", b"\r", b'"', b"'", "é\u2028".encode(), b"\xed\xa0\x80", b"\x1b[31m", b","))
    return data[:place] + what + data[place:], f"{what!r} put in at {place}"


def _lines(data: bytes, other: bytes, chance: random.Random) -> tuple[bytes, str]:
    lines = data.splitlines(keepends=True) or [b""]
    row = chance.randrange(len(lines))
    what = chance.choice(("dropped", "doubled", "moved", "emptied", "blown up", "another's"))
    line = lines.pop(row)
    if what == "doubled":
        lines[row:row] = [line, line]
    elif what == "moved":
        lines.insert(chance.randrange(len(lines) + 1), line)
    elif what == "emptied":
        lines.insert(row, b"\n")
    elif what == "blown up":
        lines.insert(row, line.rstrip(b"\r\n") * chance.choice((2, 5000)) + b"\n")
    elif what == "another's":
        lines.insert(row, chance.choice(other.splitlines(keepends=True) or [b""]))
    return b"".join(lines), f"line {row} {what}"


def _tree(data: bytes, other: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Change one value or key of JSON, JSON lines or YAML."""
    text = data.decode("utf-8", "replace")
    lines = text.splitlines()
    if len(lines) > 1 and text.lstrip().startswith("{") and lines[0].rstrip().endswith("}"):  # JSON lines
        row = chance.randrange(len(lines))
        changed, how = _tree(lines[row].encode(), other, chance)
        return "\n".join([*lines[:row], changed.decode("utf-8", "replace"), *lines[row + 1 :]]).encode(), f"line {row}, {how}"
    try:
        tree, is_json = json.loads(text), True
    except ValueError:
        tree, is_json = yaml.safe_load(text), False
    places = list(_places(tree))
    if not places:
        return b"", "emptied"
    holder, key, path = chance.choice(places)
    marker = "a-place-of-its-own"
    value = holder[key]
    if chance.random() < 0.2:
        how = _change_keys(holder, key, chance)
        return (json.dumps(tree, indent=1) if is_json else yaml.safe_dump(tree, sort_keys=False)).encode(), f"{path} {how}"
    said, new = chance.choice(_values(value, chance))
    holder[key] = marker
    written = json.dumps(tree, indent=1) if is_json else yaml.safe_dump(tree, sort_keys=False)
    return written.replace(f'"{marker}"' if is_json else marker, new, 1).encode("utf-8", "surrogatepass"), f"{path} {said}"


def _places(tree: Any, path: str = "") -> Any:
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key, f"{path}/{key}"
        yield from _places(tree[key], f"{path}/{key}")


def _change_keys(holder: Any, key: Any, chance: random.Random) -> str:
    if isinstance(holder, list):
        what = chance.choice(("dropped", "doubled"))
        holder[key : key + 1] = [] if what == "dropped" else [holder[key]] * 2
        return what
    if chance.random() < 0.6:
        del holder[key]
        return "dropped"
    holder[f"{key}x"] = holder.pop(key)
    return "renamed"


def _values(value: Any, chance: random.Random) -> list[tuple[str, str]]:
    """Return JSON texts that may stand in the place of a value."""
    deep = chance.choice((50, 1000, 100_000))
    found = [
        ("null", "null"),
        ("true", "true"),
        ("a text", '"four"'),
        ("an empty text", '""'),
        ("a list", "[]"),
        ("a list of lists", "[[1], [2]]"),
        ("an object", '{"a": 1}'),
        ("NaN", "NaN"),
        ("infinite", "-Infinity"),
        ("1e999", "1e999"),
        ("-1", "-1"),
        ("0", "0"),
        ("2.5", "2.5"),
        ("2^63", str(1 << 63)),
        ("10^18", str(10**18)),
        ("5,000 digits", "9" * 5000),
        (f"{deep} levels", "[" * deep + "]" * deep),
        ("a lone surrogate", '"\\ud800"'),
        ("a NUL", '"a\\u0000b"'),
        ("a path out", '"../../../etc/passwd"'),
        ("a line break", '"a\\nb"'),
    ]
    if isinstance(value, bool):
        found += [("negated", json.dumps(not value))] * 3
    elif isinstance(value, int | float):
        found += [("one more", json.dumps(value + 1)), ("one less", json.dumps(value - 1)), ("doubled", json.dumps(value * 2))]
    elif isinstance(value, str) and value:
        place = chance.randrange(len(value))
        found += [("another letter", json.dumps(value[:place] + chance.choice("0af_ /") + value[place + 1 :]))] * 4
    return found


BYTES: list[Callable[[bytes, bytes, random.Random], tuple[bytes, str]]] = [
    *[_flip] * 5,
    _run_of(0),
    _run_of(0xFF),
    _random_run,
    *[_truncate] * 2,
    _drop,
    _double,
    _insert,
    _append,
    *[_blow_up] * 4,
    _swap,
]
TEXT: list[Callable[[bytes, bytes, random.Random], tuple[bytes, str]]] = [_recode, *[_foreign_letters] * 3, *[_lines] * 4]
