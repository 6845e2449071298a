"""Check the English of docs, docstrings, help texts, messages and templates: plain words, short sentences.

python docs/prose.py            # exit code 1 and one line per offender
python docs/prose.py docs xcompat/mapping

A rule is a construction that readers stopped at, and the wording to use instead.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "xcompat")
LONGEST = 32  # words in a sentence
RULES = {
    r"\bthat which\b|\bwhoever\b|\bwhatever\b|\bwhichever\b": "name the thing",
    r"\banew\b": "again, or a verb with re-",
    r"\bembed(s|ded|ding)? (it |them |\w+ )?again\b": "re-embed",
    r"\bunless given\b": "let the tool print the default",
    r"\blikewise\b": "also",
    r"\bat hand\b|\bto be had\b": "available",
    r"\bbeforehand\b": "first, or before",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bcomes? along\b": "is included",
    r"\bsuch as\b": "e.g.",
    r"\bleaves? (it|them|this) out\b": "remove",
    r"\bone another\b|\bthe one that\b|\bones that\b": "name the thing",
    r"(?<!there )\b(is|are) no (?!longer|more|less|better|worse|such|surer|smaller|larger|further)": "is not a",
    r"\bperhaps\b": "optional, or sometimes",
    r"\bwhat (is|was|are|were) (held out|asked|given|said|found|there|known|left)\b": "use a noun, e.g. validation split",
    r"\bwhat users have\b": "the current system",
}
SQL = re.compile(r"\b(SELECT|FROM pg_|ALTER|CREATE) ")
FORBIDDEN = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in RULES.items()]


def main(paths: list[str]) -> int:
    """Print each offender with its place, and return the exit code."""
    files = [file for path in paths or CHECKED for file in files_of(ROOT / path)]
    offenders = [line for file in files for line in check(file)]
    sys.stdout.writelines(f"{line}\n" for line in offenders)
    return int(bool(offenders))


def files_of(path: Path) -> list[Path]:
    """List the pages, modules and templates below a path."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in (".md", ".py", ".j2"))


def check(file: Path) -> Iterator[str]:
    """Yield one line per offending sentence."""
    read = {".py": strings_of, ".j2": texts_of}.get(file.suffix, paragraphs_of)
    for line, text in read(file.read_text(encoding="utf-8")):
        place = f"{file.relative_to(ROOT)}:{line}"
        for sentence in re.split(r"(?<=[.!?:;])\s+", text):
            for pattern, instead in FORBIDDEN:
                if found := pattern.search(sentence):
                    yield f"{place}: '{found[0]}' ({instead}): {sentence}"
            if len(sentence.split()) > LONGEST:
                yield f"{place}: {len(sentence.split())} words in a sentence (at most {LONGEST}): {sentence}"


def strings_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and other strings of several words, without code spans and doctests."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not SQL.search(node.value):
            text = re.sub(r":\w+:`[^`]*`|``[^`]*``|`[^`]*`|(?m:^\s*(>>>|\.\.\.).*$)", "x", node.value)
            yield from ((node.lineno, " ".join(part.split())) for part in re.split(r"\n\s*\n", text))


def texts_of(template: str) -> Iterator[tuple[int, str]]:
    """Yield the texts between the tags of a template, and the strings of several words within its statements."""

    def keep_strings(statement: re.Match[str]) -> str:
        return "|".join(re.findall(r"'([^']* [^']*)'", statement[0])) + "\n" * statement[0].count("\n") + "|"

    template = re.sub(r"{%.*?%}", keep_strings, template, flags=re.DOTALL)
    yield from paragraphs_of(re.sub(r"<[^>]*>", "|", re.sub(r"{{.*?}}", "x", template)))


def paragraphs_of(page: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs, list items and cells of a page, without code, links' targets and comments."""
    code = re.compile(r"```.*?```|<!--.*?-->|^    .*?$", re.DOTALL | re.MULTILINE)
    page = code.sub(lambda block: "\n" * block[0].count("\n"), page)
    page = re.sub(r"`[^`\n]*`", "x", re.sub(r"\]\([^)\s]*\)|\*", "", page))
    line = 1
    for part in re.split(r"(\n\s*\n|\n(?=[-|#\d]))", page):
        for cell in part.split("|"):
            yield line, " ".join(cell.split())
        line += part.count("\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
