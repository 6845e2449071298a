"""Draws the pictures of docs/methods from a short description of each method: one visual language, the same bytes each time.

python docs/pictures.py
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Line

FOLDER = Path(__file__).parent / "methods"
State = Literal["data", "vectors", "trained", "adapted", "solved", "frozen", "loss", "stored"]
LOOKS: dict[State, tuple[str, str, str]] = {  # its name in the legend, fill, edge
    "data": ("", "#f0efec", "#8a8781"),
    "vectors": ("", "#ffffff", "#8a8781"),
    "trained": ("trained", "#ffdfb0", "#bd6f12"),
    "adapted": ("frozen but for small parts, which are trained", "#d9e6f2", "#bd6f12"),
    "solved": ("solved, without steps", "#d8edcf", "#4a8438"),
    "frozen": ("frozen", "#d9e6f2", "#4a78a6"),
    "loss": ("", "#f9d4d2", "#b4453f"),
    "stored": ("stored in the gallery", "#e4dcf3", "#7457ac"),
}
INK, PAPER, RULE = "#26241f", "#fcfbf8", "#d8d4cb"
COLUMN, ROW, WIDTH, HEIGHT, MARGIN = 1.92, 0.86, 1.52, 0.6, 0.22
"""Inches: from box to box, a box, and around all of them."""


@dataclass(frozen=True)
class Part:
    """A box: its text, what happens to it in training, and whether it is left behind when training ends."""

    text: str
    state: State
    left_behind: bool = False


data, vectors, trained, adapted, solved, frozen, stored = (
    partial(Part, state=state) for state in ("data", "vectors", "trained", "adapted", "solved", "frozen", "stored")
)
helper = partial(Part, state="trained", left_behind=True)


@dataclass(frozen=True)
class Lane:
    """Parts from left to right. They start in a column, or behind parts of other lanes, which are named by their texts."""

    parts: tuple[Part, ...]
    after: tuple[str, ...] = ()
    start: int = 0


def lane(*parts: Part, after: tuple[str, ...] = (), start: int = 0) -> Lane:
    """Return a lane of some parts."""
    return Lane(parts, after, start)


@dataclass(frozen=True)
class Picture:
    """What a method trains, and which parts remain when queries search.

    Args:
        lanes: training, from top to bottom.
        losses: the text of each, and the texts of the parts that it compares.
        query: what a query passes.
        gallery: changes to stored vectors; a single part stays unchanged.
        meets: where both end.
        arrows: further ones, from text to text.
        heading: of the lower half.
        caption: of the gallery.
    """

    lanes: tuple[Lane, ...]
    losses: tuple[tuple[str, tuple[str, ...]], ...]
    query: tuple[Part, ...]
    gallery: tuple[Part, ...] = (stored("old vectors"),)
    meets: str = "nearest neighbours"
    arrows: tuple[tuple[str, str], ...] = ()
    heading: str = "Search"
    caption: str = "the gallery stays as it is"


# ------------------------------------------------------------------------------------------------------------ descriptions

NEW, OLD, QUERY = frozen("new model"), frozen("old model"), data("query")
PHOTOS, BACKBONE, F, WHICH = data("photos with classes"), trained("new model"), vectors("f"), "which class?"
W, OLD_VECTOR, FIRST = helper("classifier W"), vectors("its old embedding"), vectors("its first d numbers")
OLD_CLASSES = frozen("old class means, or old classifier")
FOR_OLD = "which class, to the old model?"
SAME_PHOTOS = lane(OLD, OLD_VECTOR, after=(PHOTOS.text,))
ITEMS, PHI, H = data("items that both models embedded"), trained("φ"), trained("h")
LEARNED_PHI = adapted("φ, learned before from texts")


def of_classes(
    *lanes: Lane, losses: tuple[tuple[str, tuple[str, ...]], ...], arrows: tuple[tuple[str, str], ...] = ()
) -> Picture:
    """Return the picture of a new model that learns classes by a classifier of its own, and something more."""
    own = lane(PHOTOS, BACKBONE, F, W)
    return Picture((own, *lanes), ((WHICH, (W.text,)), *losses), (QUERY, BACKBONE, FIRST), arrows=arrows)


def of_a_map(part: Part, loss: str, *more: tuple[str, Part]) -> Picture:
    """Return the picture of a map from x to y, embeddings by two models that stay as they are."""
    own = (lane(ITEMS, NEW, vectors("x"), part), lane(OLD, vectors("y"), after=(ITEMS.text,)))
    return Picture(
        (*own, *(lane(known, start=3) for _, known in more)),
        ((loss, (part.text, "y")), *((text, (part.text, known.text)) for text, known in more)),
        (QUERY, NEW, part),
    )


def of_images(encoder: Part, *lanes: Lane, loss: tuple[str, tuple[str, ...]], caption: str) -> Picture:
    """Return the picture of a model that makes side-information."""
    return Picture(
        lanes,
        (loss,),
        (data("photo of an item"), encoder, stored("ψ")),
        meets="FCT maps both",
        heading="When an item is stored",
        caption=caption,
    )


PICTURES: dict[str, Picture] = {
    "xbt": Picture(
        (
            lane(data("images"), adapted("image tower with LoRA, prompts"), LEARNED_PHI, vectors("v")),
            lane(data("captions"), adapted("text tower with LoRA"), adapted("the same φ"), vectors("w")),
        ),
        (("which caption is whose?", ("v", "w")),),
        (QUERY, adapted("its tower, with what was trained"), LEARNED_PHI),
    ),
    "projection": Picture(
        (lane(data("texts"), NEW, vectors("x, and noise"), PHI), lane(OLD, vectors("y"), after=("texts",))),
        (("which text is whose?", (PHI.text, "y")),),
        (QUERY, NEW, PHI),
    ),
    "direct": Picture(
        (
            lane(data("images"), trained("image tower, or its LoRA"), PHI, vectors("v")),
            lane(vectors("old embedding of the caption"), start=3),
            lane(vectors("old embedding of the image"), start=3),
            lane(data("captions"), trained("text tower, or its LoRA"), trained("the same φ"), vectors("w")),
        ),
        (
            ("which caption is whose?", ("v", "old embedding of the caption")),
            ("which image is whose?", ("w", "old embedding of the image")),
        ),
        (QUERY, trained("its tower"), PHI),
    ),
    "ridge": of_a_map(solved("x·W + b"), "squared distance"),
    "procrustes": of_a_map(solved("rotation W"), "squared distance"),
    "whitened": of_a_map(solved("x·W, from whitened x and y"), "second moments of both"),
    "mini_vec2vec": of_a_map(solved("rotation W, without pairs"), "shapes of the clouds"),
    "lambda_orthogonality": of_a_map(solved("x·W + b, nearly a rotation"), "squared distance"),
    "geometry_residual": of_a_map(trained("Procrustes, and a network beside it"), "nearer than its neighbours?"),
    "residual_mlp": of_a_map(trained("ridge, and a network beside it"), "angle"),
    "drift_adapter": of_a_map(trained("rotation, network, factors"), "angle"),
    "query_map": of_a_map(trained("x·W + b, begun at Procrustes"), "which of all y are of its class?"),
    "rbt": of_a_map(
        trained("rotation, then narrow blocks"), "squared distance", ("same class as y?", frozen("class means of y"))
    ),
    "lce": of_a_map(trained("T, a network"), "inside its class?", ("centres near centres?", frozen("centres of the classes"))),
    "fct": Picture(
        (
            lane(frozen("side model (optional)"), vectors("ψ"), after=(ITEMS.text,)),
            lane(ITEMS, OLD, OLD_VECTOR, H),
            lane(NEW, vectors("its new embedding"), after=(ITEMS.text,)),
        ),
        (("squared distance", (H.text, "its new embedding")),),
        (QUERY, NEW),
        (stored("old vectors, and ψ"), H, stored("new vectors")),
        arrows=(("ψ", H.text),),
        caption="mapped once, without its items",
    ),
    "fastfill": Picture(
        (
            lane(frozen("side model (optional)"), vectors("ψ"), after=(ITEMS.text,)),
            lane(ITEMS, OLD, OLD_VECTOR, H),
            lane(NEW, vectors("its new embedding"), after=(ITEMS.text,)),
        ),
        (("squared distance, class, and how sure", (H.text, "its new embedding")),),
        (QUERY, NEW),
        (stored("old vectors, and ψ"), H, stored("new vectors")),
        arrows=(("ψ", H.text),),
        caption="mapped once, later re-embedded",
    ),
    "bct": of_classes(lane(OLD_CLASSES, after=(F.text,)), losses=((FOR_OLD, (OLD_CLASSES.text,)),)),
    "oca": Picture(
        (lane(PHOTOS, BACKBONE, F, helper("rotation Q, classifier W")), lane(OLD_CLASSES, after=(F.text,))),
        ((WHICH, ("rotation Q, classifier W",)), (FOR_OLD + " and the angle", (OLD_CLASSES.text,))),
        (QUERY, BACKBONE, FIRST),
    ),
    "bt2": Picture(
        (
            lane(PHOTOS, trained("new model, basis changes"), vectors("its new part"), W),
            lane(frozen("independent new model"), vectors("its embedding"), after=(PHOTOS.text,)),
            lane(FIRST, OLD_CLASSES, start=2),
            lane(OLD, OLD_VECTOR, after=(PHOTOS.text,)),
        ),
        (
            (WHICH, (W.text,)),
            ("angle", ("its new part", "its embedding")),
            (FOR_OLD, (OLD_CLASSES.text,)),
            ("the angle too", (FIRST.text, OLD_VECTOR.text)),
        ),
        (QUERY, trained("new model, basis changes"), FIRST),
        arrows=(("new model, basis changes", FIRST.text),),
    ),
    "mixbct": Picture(
        (
            lane(PHOTOS, BACKBONE, vectors("f, for some the old embedding"), W),
            lane(frozen("old model, where it is credible"), after=(PHOTOS.text,)),
        ),
        ((WHICH, (W.text,)),),
        (QUERY, BACKBONE, F),
        arrows=(("old model, where it is credible", "f, for some the old embedding"),),
    ),
    "contrast": of_classes(SAME_PHOTOS, losses=(("nearer than other classes?", (F.text, OLD_VECTOR.text)),)),
    "l2": of_classes(SAME_PHOTOS, losses=(("distance", (F.text, OLD_VECTOR.text)),)),
    "unibct": of_classes(
        lane(OLD, OLD_VECTOR, frozen("class means, weighed by f"), after=(PHOTOS.text,)),
        losses=((FOR_OLD, ("class means, weighed by f",)),),
        arrows=((F.text, "class means, weighed by f"),),
    ),
    "nccl": of_classes(
        lane(OLD, vectors("bank of old embeddings"), after=(PHOTOS.text,)),
        losses=(("which are its neighbours?", (F.text, "bank of old embeddings")),),
    ),
    "advbct": of_classes(
        lane(helper("discriminator"), after=(F.text, OLD_VECTOR.text)),
        SAME_PHOTOS,
        lane(helper("balls around old classes"), after=(F.text, OLD_VECTOR.text)),
        losses=(("new or old?", ("discriminator",)), ("inside its ball?", ("balls around old classes",))),
    ),
    "independent": Picture(
        (lane(PHOTOS, BACKBONE, F, W), lane(data("or images, captions"), trained("both towers"), vectors("v and w"))),
        ((WHICH, (W.text,)), ("or: which caption is whose?", ("v and w",))),
        (QUERY, BACKBONE),
        (stored("re-embedded items"),),
        caption="old vectors cannot be searched",
    ),
    "simclr": of_images(
        trained("encoder"),
        lane(data("photos, cut out one way"), trained("encoder"), vectors("ψ")),
        lane(data("and another way"), trained("the same encoder"), vectors("ψ of it"), start=0),
        loss=("which two are of one photo?", ("ψ", "ψ of it")),
        caption="ψ lies beside them",
    ),
    "autoencoder": of_images(
        trained("encoder"),
        lane(data("photos"), trained("encoder"), vectors("ψ"), helper("decoder")),
        lane(vectors("the photo, 32 × 32 pixels"), after=("photos",)),
        loss=("squared distance", ("decoder", "the photo, 32 × 32 pixels")),
        caption="ψ lies beside them",
    ),
}

# ----------------------------------------------------------------------------------------------------------------- drawing


class Panel:
    """Half of a picture: boxes in columns and rows, and arrows between them.

    Args:
        axes: in inches.
        top: of the first row.
    """

    def __init__(self, axes: Axes, top: float) -> None:
        self.axes, self.top = axes, top
        self.places: dict[str, tuple[float, float]] = {}

    def place(self, column: float, row: float) -> tuple[float, float]:
        """Return the middle of a box."""
        return MARGIN + WIDTH / 2 + column * COLUMN, self.top - HEIGHT / 2 - row * ROW

    def box(self, part: Part, column: float, row: float) -> None:
        """Draw a part."""
        x, y = self.places[part.text] = self.place(column, row)
        _, fill, edge = LOOKS[part.state]
        self.axes.add_patch(
            FancyBboxPatch(
                (x - WIDTH / 2, y - HEIGHT / 2),
                WIDTH,
                HEIGHT,
                boxstyle=f"round,pad=0,rounding_size={HEIGHT / 2 if part.state == 'loss' else 0.07}",
                facecolor=fill,
                edgecolor=edge,
                linewidth=1.4,
                linestyle=(0, (4, 2.4)) if part.left_behind else "solid",
            )
        )
        self.axes.text(x, y, textwrap.fill(part.text, 19), ha="center", va="center", fontsize=8.5, color=INK, linespacing=1.15)

    def arrow(self, source: str, target: str) -> None:
        """Draw an arrow from a box to one on its right, by the gap that follows the first."""
        (x, y), (to_x, to_y) = self.places[source], self.places[target]
        gap = x + COLUMN / 2
        points = [(x + WIDTH / 2, y), (gap, y), (gap, to_y), (to_x - WIDTH / 2, to_y)]
        path = Line(points if y != to_y else [points[0], points[-1]])
        self.axes.add_patch(
            FancyArrowPatch(path=path, arrowstyle="-|>,head_length=4,head_width=2.2", color=INK, lw=1.1, fill=False)
        )


def draw(picture: Picture) -> Figure:
    """Draw training above, and what follows below.

    Args:
        picture: the description.
    """
    columns = _columns(picture)
    last = max(max(columns.values()) + 1, len(picture.query), len(picture.gallery))
    heights = _heights_of_losses(picture)
    rows = max(len(picture.lanes), heights[-1] + 1)
    width, height = last * COLUMN + WIDTH + 2 * MARGIN, (rows + 2) * ROW + 1.06
    figure = Figure(figsize=(width, height), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    _heading(axes, "Training", height - 0.2)
    training = Panel(axes, height - 0.4)
    for row, line in enumerate(picture.lanes):
        for part in line.parts:
            training.box(part, columns[part.text], row)
    for (text, _), row in zip(picture.losses, heights, strict=True):
        training.box(Part(text, "loss"), last, row)
    for source, target in _arrows(picture):
        training.arrow(source, target)
    middle = height - 0.4 - rows * ROW + 0.05
    axes.plot([MARGIN, width - MARGIN], [middle, middle], color=RULE, linewidth=1)
    _heading(axes, picture.heading, middle - 0.22)
    _draw_search(Panel(axes, middle - 0.42), picture, last)
    _draw_legend(axes, picture)
    return figure


def _columns(picture: Picture) -> dict[str, int]:
    """Return the column of each part by its text; a lane may stand above its predecessor."""
    columns: dict[str, int] = {}
    for line in sorted(picture.lanes, key=lambda line: len(line.after)):
        first = max((columns[text] + 1 for text in line.after), default=line.start)
        columns |= {part.text: first + place for place, part in enumerate(line.parts)}
    return columns


def _heights_of_losses(picture: Picture) -> list[float]:
    """Return the row of each loss: between the parts that it compares, and below the one before."""
    rows = {part.text: row for row, line in enumerate(picture.lanes) for part in line.parts}
    heights: list[float] = []
    for _, compared in picture.losses:
        wanted = [rows[text] for text in compared]
        heights.append(max(sum(wanted) / len(wanted), heights[-1] + 1 if heights else 0))
    return heights


def _arrows(picture: Picture) -> list[tuple[str, str]]:
    """Return all arrows of the training: along lanes, from what they follow, into losses, and the further ones."""
    along = [
        (first.text, second.text) for line in picture.lanes for first, second in zip(line.parts, line.parts[1:], strict=False)
    ]
    follow = [(text, line.parts[0].text) for line in picture.lanes for text in line.after]
    into = [(text, loss) for loss, compared in picture.losses for text in compared]
    return [*along, *follow, *into, *picture.arrows]


def _draw_search(panel: Panel, picture: Picture, last: int) -> None:
    meets = Part(picture.meets, "data")
    panel.box(meets, last, 0.5)
    first = {}
    for row, parts in enumerate((picture.query, picture.gallery)):
        first[row] = max(last - len(parts), 0)
        for place, part in enumerate(parts):
            panel.box(part, first[row] + place, row)
        for before, after in zip(parts, (*parts[1:], meets), strict=True):
            panel.arrow(before.text, after.text)
    x, y = panel.place(first[1], 1)
    beside = first[1] > 0
    where = (x - WIDTH / 2 - 0.12, y) if beside else (x + WIDTH / 2, y - HEIGHT / 2 - 0.12)
    caption = textwrap.fill(picture.caption, 16 if first[1] == 1 else 40)
    panel.axes.text(*where, caption, ha="right" if beside else "center", va="center", fontsize=8.5, style="italic", color=INK)


def _heading(axes: Axes, text: str, y: float) -> None:
    axes.text(MARGIN, y, text, fontsize=9.5, fontweight="bold", color=INK, va="center")


def _draw_legend(axes: Axes, picture: Picture) -> None:
    parts = [*(part for line in picture.lanes for part in line.parts), *picture.query, *picture.gallery]
    entries = [
        (name, fill, edge, "solid") for state, (name, fill, edge) in LOOKS.items() if name and state in {p.state for p in parts}
    ]
    if any(part.left_behind for part in parts):
        entries.append(("left behind when training ends", LOOKS["trained"][1], LOOKS["trained"][2], (0, (2, 1.2))))
    x = MARGIN
    for name, fill, edge, dashes in entries:
        axes.add_patch(
            FancyBboxPatch(
                (x, 0.13), 0.2, 0.13, boxstyle="round,pad=0,rounding_size=0.03", facecolor=fill, edgecolor=edge, ls=dashes
            )
        )
        axes.text(x + 0.27, 0.195, name, fontsize=8, color=INK, va="center")
        x += 0.5 + 0.0625 * len(name)


def as_svg(picture: Picture) -> bytes:
    """Return a picture's file.

    Args:
        picture: the description.
    """
    file = BytesIO()
    fonts = {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"]}
    with mpl.rc_context({"svg.hashsalt": "xcompat", "svg.fonttype": "none", **fonts}):
        draw(picture).savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (FOLDER / f"{name}.svg").write_bytes(as_svg(picture))
