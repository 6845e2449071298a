"""Names, ids, captions and classes may come from strangers: cards, reports and the terminal show them and obey none."""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from PIL import Image
from rich.console import Console
from test_compare import make_contenders
from test_report import make_content

from xcompat import Fingerprint, XcompatError
from xcompat.core import failures
from xcompat.core.errors import visible
from xcompat.core.markdown import as_block, as_code, as_text
from xcompat.evaluation import Criterion, Difference, EmbeddedImages
from xcompat.evaluation.cases import TEXT_TO_TEXT
from xcompat.hub.card import ModelFacts, RunFacts, model_card
from xcompat.hub.lineage import Ancestor, draw
from xcompat.hub.metadata import Gain
from xcompat.report import Example, ExampleRow, Hit, ModelInfo, Report, print_report, render_html, render_markdown
from xcompat.report.comparison import Comparison, compare, print_comparison, write_comparison
from xcompat.report.report import build_report

IN_HTML = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", '" onmouseover="alert(1)', "' autofocus onfocus=alert(1) '",
    "</pre>", "</details>", "</style>", "<!--", "-->", "]]>", "&lt;script&gt;", "{{ 7 * 7 }}", "{% raw %}",
)  # fmt: skip
IN_MARKDOWN = (
    "![](http://tracker/x.png)", "[click](javascript:alert(1))", "<http://tracker>", "http://tracker", "www.tracker.com",
    "[a]: http://tracker", "`", "```", "~~~", "**", "_", "\n", "\n\n", "\t", "---", "\n---\n", "===", "# ", "\n# ", "- ", "1. ",
    "> ", "|", "\\", "$", ": ", "'", '"', "!!python",
)  # fmt: skip
IN_TERMINALS = (
    "\x1b[2J", "\x1b]0;title\x07", "\x07", "\x08", "\r", "\x9b31m", "\u202e", "\u2028", "[red]", "[/]", "[link=http://tracker]",
)  # fmt: skip
PIECES = (*IN_HTML, *IN_MARKDOWN, *IN_TERMINALS)
hostile = (
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3) | st.just("name "), min_size=1, max_size=6)
    .map("".join)
    .filter(str.strip)
)
PLAIN = "plain"


@pytest.fixture(scope="module")
def report() -> Report:
    return build_report(replace(make_content(), tsne_pairs=0))


def called(report: Report, name: str) -> Report:
    """Return a report in which everything that somebody else can name has this name."""
    case = replace(report.cases[0], gallery=name, direction=name)
    lost = [replace(case, query=query, gallery="old", metrics={name: 0.5}, ci95={name: (0, 1)}) for query in ("old", "new")]
    hits = [Hit(Image.new("RGB", (2, 2)), name, True), Hit(None, name, False), Hit(None, name, True, 2.0)]
    changes: dict[str, Any] = {"old": ModelInfo(name, name, 8), "new": ModelInfo(name, name, 8), "method": name}
    changes["criterion"] = Criterion(False, None, [name], [Difference(name, name, 0.1, (-0.1, 0.3), 100)])
    changes |= {"cases": [case, replace(case, query=name), *lost], "examples": [Example(name, [ExampleRow(name, hits)])]}
    return replace(report, **changes, seconds={name: 1.0}, run={"notes": [name], name: name})


def judged(report: Report) -> Report:
    """Return a report on texts, whose example searches are laid out as lines."""
    return replace(report, cases=[replace(case, direction=TEXT_TO_TEXT) for case in report.cases])


def elements(page: str) -> list[Any]:
    """Return every tag with its attributes' names, comment and declaration of a page, in order."""
    found: list[Any] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, [name for name, _ in attrs]))

        def handle_endtag(self, tag: str) -> None:
            found.append(tag)

        def other(self, said: str) -> None:
            found.append(said)

        handle_comment = handle_decl = handle_pi = unknown_decl = other

    parser = Parser()
    parser.feed(page)
    parser.close()
    return found


def structure(text: str) -> list[Any]:
    """Return everything that Markdown makes of a text but text itself."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)
    inner = [each for token in tokens for each in (token, *(token.children or []))]
    texts = ("text", "inline", "text_special")
    return [(token.type, token.tag, sorted(token.attrs)) for token in inner if token.type not in texts]


@settings(max_examples=30)
@given(name=hostile)
def test_pages_hold_the_elements_of_their_template_alone(name: str, report: Report) -> None:
    plots = {"cases-0.png": b"", "recall-0.png": b""}
    assert elements(render_html(called(report, name), plots)) == elements(render_html(called(report, PLAIN), plots))
    texts = [judged(called(report, each)) for each in (name, PLAIN)]
    assert elements(render_html(texts[0], plots)) == elements(render_html(texts[1], plots))
    assert structure(render_markdown(called(report, name))) == structure(render_markdown(called(report, PLAIN)))


@given(name=hostile)
def test_a_text_is_text(name: str) -> None:
    assert structure(f"before {as_text(name)} after") == structure("before plain after")
    assert {kind for kind, *_ in structure(as_text(name))} <= {"paragraph_open", "paragraph_close"}
    table = "| a | b |\n|---|---|\n| {} | {} |"
    assert structure(table.format(as_text(name), as_code(name))) == structure(table.format("a", "`b`"))
    assert [token.type for token in MarkdownIt().parse(as_block(f"x\n{name}", "yaml"))] == ["fence"]


FACTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "adapters": {"holds": "adapters"},
    "map": {"holds": "map"},
    "of galleries": {"maps_galleries": True},
    "with side-information": {"maps_galleries": True, "side_info": {"name": PLAIN, "dim": 4}},
}


@cache
def card_of(name: str, kind: str) -> str:
    """Write a card in which everything that somebody else can name has this name."""
    facts = {key: value | {"name": name} if key == "side_info" else value for key, value in FACTS[kind].items()}
    old = {"name": name, "fingerprint": name, "dim": 8, "revision": name}
    base = f"/models/{name}" if kind == "map" else name  # which is on no Hub
    described = {"name": base, "revision": name, "fingerprint": "0" * 64, "library": "transformers"}
    model = ModelFacts("xbt", name, Fingerprint.from_string("a"), 16, [old], described, embeds_texts=True, **facts)
    data, recipe = {name: [name], "texts": [name]}, f"name: plain\n{name}"
    gains = [Gain(name, name, 0.5, 0.6, 0.1, (0.05, 0.15))]
    facts = {"measured_on": name, "machine": name, "datasets": [name], "versions": {name: name}}
    run = RunFacts(gains=gains, data=data, recipe=recipe, seconds=90.0, **facts)
    return str(model_card("me/model", model, None, run, name, [name]))


@pytest.mark.parametrize("kind", FACTS)
@settings(max_examples=15)
@given(name=hostile)
def test_a_card_holds_the_structure_of_its_template_alone(name: str, kind: str) -> None:
    text, plain = card_of(name, kind), card_of(PLAIN, kind)
    card, expected = ModelCard(text), ModelCard(plain)
    assert structure(card.text) == structure(expected.text)
    keys, wanted_keys = (each.data.to_dict().keys() - {"base_model", "base_model_relation"} for each in (card, expected))
    assert keys == wanted_keys
    assert card.data.library_name == "xcompat" and card.data.compatible_with[0]["dim"] == 8
    (code,), (wanted,) = (re.findall(r"^(`{3,})python\n(.*?)\n\1$", each, re.DOTALL | re.MULTILINE) for each in (text, plain))
    lines = [[line.partition("#")[0] for line in each[1].splitlines()] for each in (code, wanted)]
    assert lines[0] == lines[1], "no name leaves its comment"
    compile(code[1], "README.md", "exec")


def printed(show: Callable[[Console], None]) -> str:
    buffer = io.StringIO()
    show(Console(file=buffer, width=300, force_terminal=True, color_system=None, highlight=False))
    return buffer.getvalue()


@settings(max_examples=20)
@given(name=hostile)
def test_the_terminal_obeys_no_name(name: str, report: Report) -> None:
    """Without colours nothing that is printed is a control sequence: links and titles are ones too."""
    first = Ancestor(name, name, name, 8, older=[Ancestor(name, "", broken=name)])
    for show in (lambda console: print_report(called(report, name), console), lambda console: console.print(draw(first))):
        shown = printed(show)
        assert visible(shown) == shown


@given(name=hostile)
def test_what_stops_a_command_is_one_line_whatever_it_names(name: str) -> None:
    damaged = XcompatError(f"the model at {name} is damaged; fetch it again")
    nested = XcompatError(f"data.test: {damaged}")
    errors = (damaged, nested, OSError(errno.EACCES, "Permission denied", name), RuntimeError(f"{name}: No space left on device"))
    for line in (str(damaged), str(nested), *map(failures.explain, errors)):
        assert line is not None and len(f"({line})".splitlines()) == 1 and visible(line) == line
    assert failures.explain(nested) == str(nested) == f"data.test: {damaged}", "spelled out once"
    assert name.isprintable() <= (name in str(damaged))


def comparison_of(folder: Path, name: str) -> Comparison:
    contenders = make_contenders(folder, EmbeddedImages, seeds=[0])
    return compare(name, [replace(each, name=f"{name}{number}") for number, each in enumerate(contenders)], 20)


def test_comparisons_hold_the_structure_of_their_templates_alone(tmp_path: Path) -> None:
    found, expected = comparison_of(tmp_path / "a", "".join(PIECES)), comparison_of(tmp_path / "b", PLAIN)
    pages = [write_comparison(tmp_path / name, each) for name, each in (("a", found), ("b", expected))]
    for suffix, read in ((".html", elements), (".md", structure)):
        first, second = (read(page.with_suffix(suffix).read_text(encoding="utf-8")) for page in pages)
        assert first == second
    shown = printed(lambda console: print_comparison(found, console))
    assert visible(shown) == shown
