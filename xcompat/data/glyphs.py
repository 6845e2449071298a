"""Built-in data: an image and a caption per named character in matplotlib's fonts."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.files import atomic_path
from xcompat.core.lazy import datasets
from xcompat.data.schema import CAPTION, ID, IMAGE, LABEL

if TYPE_CHECKING:
    from datasets import Dataset
    from numpy.typing import NDArray
    from PIL import ImageFont

REGULAR_FACES = ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif", "STIXGeneral")
"""Upright regular faces, one per design. The quickstart's old model trains on them, and its galleries contain them."""
OLD_CHARACTERS = 2000
"""Number of characters in the old model's training data."""

CLASS_FACES = {
    "train": (
        "DejaVuSans",
        "STIXGeneralItalic",
        "DejaVuSerif-Bold",
        "DejaVuSansMono",
        "DejaVuSans-BoldOblique",
        "STIXGeneralBolIta",
        "DejaVuSansMono-Bold",
        "DejaVuSerif-Italic",
    ),
    "query": ("STIXGeneral", "DejaVuSans-Bold", "DejaVuSansMono-Oblique", "DejaVuSerif-BoldItalic"),
    "gallery": ("DejaVuSerif", "DejaVuSans-Oblique", "STIXGeneralBol", "DejaVuSansMono-BoldOblique"),
    "validation": ("DejaVuSansMono", "DejaVuSerif-Italic"),
}
"""Faces of the glyph classes. Every font family is in ``train``, ``query`` and ``gallery``, in different styles.
These three share no face; the faces of ``validation`` are in ``train``."""

CLASS_FORMAT = 2
"""Version of cached glyph classes (columns and faces). Other versions are rebuilt."""

_PATTERNS = ("DejaVu*.ttf", "STIXGeneral*.ttf")
_EM = 26 / 32  # font size over image size: DejaVu's tallest accents and deepest descenders just fit
_BASELINE = 25 / 32
# Characters named by numbers. Names such as "braille pattern dots-125" describe the image.
_NUMBERED = re.compile(
    r"^(CJK \w+ IDEOGRAPH|TANGUT \w+|NUSHU CHARACTER|KHITAN SMALL SCRIPT CHARACTER|CYPRO-MINOAN SIGN|VARIATION SELECTOR)-"
    r"|^HANGUL SYLLABLE |^(EGYPTIAN|ANATOLIAN) HIEROGLYPH [A-Z]+\d|^LINEAR [AB] \w+ [A-Z]+\d|^GREEK \w+ NOTATION SYMBOL-"
)


@dataclass(frozen=True)
class Glyphs:
    """Rendered characters, ordered by face and code point.

    Args:
        images_NHW: grey images, uint8, ink 255 on 0.
        character_N: code points, int32.
        face_N: indices into ``faces``, int32.
        faces: names of the font faces.
        names: caption (lower-case Unicode name) of each code point.
    """

    images_NHW: NDArray[np.uint8]
    character_N: NDArray[np.int32]
    face_N: NDArray[np.int32]
    faces: list[str]
    names: dict[int, str]

    def select(self, characters: Iterable[int], faces: Collection[str] | None = None) -> Glyphs:
        """Keep the renderings of some characters in some faces.

        Args:
            characters: code points.
            faces: names of faces; None for all.

        Returns:
            The selection in the same order, with all names in ``faces``, to keep indices valid.

        Raises:
            XcompatError: a face was not rendered.
        """
        wanted = self.faces if faces is None else faces
        if unknown := sorted(set(wanted) - set(self.faces)):
            raise XcompatError(f"no face {unknown[0]!r} among the glyphs; known: {', '.join(self.faces)}")
        keep_N = np.isin(self.character_N, np.fromiter(characters, dtype=np.int32))
        keep_N &= np.isin(self.face_N, [self.faces.index(face) for face in wanted])
        kept = self.character_N[keep_N]
        names = {code: self.names[code] for code in np.unique(kept).tolist()}
        return Glyphs(self.images_NHW[keep_N], kept, self.face_N[keep_N], self.faces, names)


def render_glyphs(size: int = 32) -> Glyphs:
    """Render every named character of matplotlib's DejaVu and STIXGeneral text faces.

    Glyphs keep their size and position, to distinguish e.g. comma and apostrophe; oversized ones shrink. Skips blank glyphs, the
    ``.notdef`` box and the two Display faces.

    Args:
        size: height and width in pixels.

    Returns:
        About 54,000 renderings of 7,300 characters in 16 faces.

    Example:
        >>> glyphs = render_glyphs(16)
        >>> glyphs.images_NHW.shape[1:], len(glyphs.faces), glyphs.names[0x3B1]
        ((16, 16), 16, 'greek small letter alpha')
    """
    from PIL import ImageFont

    paths = _font_files()
    images, characters, faces, names = [], [], [], {}
    for face, path in enumerate(paths):
        font = ImageFont.truetype(path, round(size * _EM), layout_engine=ImageFont.Layout.BASIC)
        for code in _mapped_characters(path):
            name = unicodedata.name(chr(code), "")
            image_HW = _render(font, chr(code), size) if name else None
            if image_HW is not None:
                images.append(image_HW)
                characters.append(code)
                faces.append(face)
                names[code] = name.lower()
    return Glyphs(
        np.stack(images), np.array(characters, np.int32), np.array(faces, np.int32), [path.stem for path in paths], names
    )


def _font_files() -> list[Path]:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    paths = sorted(path for pattern in _PATTERNS for path in folder.glob(pattern) if "Display" not in path.stem)
    if missing := set(REGULAR_FACES) - {path.stem for path in paths}:
        raise XcompatError(f"matplotlib's font folder {folder} lacks {min(missing)}.ttf; reinstall matplotlib")
    return paths


def _mapped_characters(path: Path) -> list[int]:
    """List the code points with a real glyph, ascending."""
    from fontTools.ttLib import TTFont

    with TTFont(path, lazy=True) as font:
        return sorted(code for code, glyph in font.getBestCmap().items() if glyph != ".notdef")


def _render(font: ImageFont.FreeTypeFont, character: str, size: int) -> NDArray[np.uint8] | None:
    """Draw a character on its baseline, centred by advance width; None without ink."""
    mask, (left, top) = font.getmask2(character, mode="L", anchor="ms")
    width, height = mask.size
    if not width or not height:
        return None
    ink_HW = np.array(mask, dtype=np.uint8).reshape(height, width)
    if not ink_HW.any():
        return None
    if max(width, height) > size:
        from PIL import Image

        scale = size / max(width, height)
        shape = (max(1, round(width * scale)), max(1, round(height * scale)))
        ink_HW = np.asarray(Image.fromarray(ink_HW).resize(shape, Image.Resampling.BOX))
        (width, height), left, top = shape, round(left * scale), round(top * scale)
    left = min(max(size // 2 + left, 0), size - width)  # combining marks hang left of a zero-width origin
    top = min(max(round(size * _BASELINE) + top, 0), size - height)
    image_HW = np.zeros((size, size), np.uint8)
    image_HW[top : top + height, left : left + width] = ink_HW
    return image_HW


def split_characters(glyphs: Glyphs, n_test: int = 1000, seed: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Split by character. No test character is trained on in any face.

    Test characters come from the regular faces, so galleries with these faces contain each.

    Args:
        glyphs: the renderings.
        n_test: number of test characters.
        seed: random seed.

    Returns:
        Training and test code points, ascending.

    Raises:
        XcompatError: not enough candidates.
    """
    regular = [glyphs.faces.index(face) for face in REGULAR_FACES]
    candidates = np.unique(glyphs.character_N[np.isin(glyphs.face_N, regular)])
    if not 0 < n_test < len(candidates):
        raise XcompatError(f"n_test={n_test} must be at least 1 and less than the {len(candidates)} available characters")
    test = np.sort(np.random.default_rng(seed).permutation(candidates)[:n_test])
    return np.setdiff1d(glyphs.character_N, test), test


def glyph_parts(glyphs: Glyphs, seed: int) -> dict[str, Glyphs]:
    """Split renderings into data of the old model, of the new model, and test data.

    The old model gets :data:`OLD_CHARACTERS` training characters in the regular faces, the new model all of them in all faces.
    Test characters are in the regular faces.

    Args:
        glyphs: the renderings.
        seed: random seed.

    Returns:
        ``old_train``, ``new_train`` and ``test``.
    """
    train, test = split_characters(glyphs, seed=seed)
    old = np.random.default_rng(seed).permutation(train)[:OLD_CHARACTERS]
    return {
        "old_train": glyphs.select(old, REGULAR_FACES),
        "new_train": glyphs.select(train),
        "test": glyphs.select(test, REGULAR_FACES),
    }


def unicode_corpus(exclude: Iterable[str] = ()) -> list[str]:
    """List lower-case Unicode character names by code point, except those with numbers (ideographs, Hangul etc.).

    Args:
        exclude: captions to drop, e.g. of test characters.

    Example:
        >>> corpus = unicode_corpus(exclude=["latin small letter a"])
        >>> "latin small letter b" in corpus, "latin small letter a" in corpus
        (True, False)
    """
    excluded = {text.lower() for text in exclude}
    names = (unicodedata.name(chr(code), "") for code in range(sys.maxunicode + 1))
    described = (name.lower() for name in names if name and not _NUMBERED.match(name))
    return [name for name in described if name not in excluded]


def to_dataset(glyphs: Glyphs) -> Dataset:
    """Convert renderings to a data set. The faces of a character share an id.

    Returns:
        Columns ``image`` (grey PNG), ``caption``, ``id`` (e.g. ``"U+03B1"``) and ``face``.
    """
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature

    codes = glyphs.character_N.tolist()
    features = Features({"image": ImageFeature(), "caption": Value("string"), "id": Value("string"), "face": Value("string")})
    columns = {
        "image": [{"bytes": _png(image_HW), "path": None} for image_HW in glyphs.images_NHW],
        "caption": [glyphs.names[code] for code in codes],
        "id": [f"U+{code:04X}" for code in codes],
        "face": [glyphs.faces[face] for face in glyphs.face_N.tolist()],
    }
    return Dataset.from_dict(columns, features=features)


def write_glyph_classes(folder: str | Path, n_classes: int = 1000, size: int = 32) -> None:
    """Write a classification data set of characters (classes) in typefaces (instances). No test typeface is in ``train``.

    ``train`` has eight typefaces, ``query`` and ``gallery`` four others each. To choose hyper-parameters, train on ``fit`` (six
    typefaces of ``train``) and evaluate on ``validation`` (the other two) as queries and gallery. Each query has one positive.

    Classes are ordered by code point, so ``Subset(scenario="extended-class", fraction=0.5, side="old")`` selects the first half.
    Images are ordered by the typefaces in `CLASS_FACES`, then by class.

    Args:
        folder: gets five ``datasets.save_to_disk`` folders with ``image`` (grey PNG), ``id`` (e.g. ``"U+03B1 DejaVuSans"``),
            ``label`` (ClassLabel of lower-case Unicode names) and ``caption`` (the same name).
        n_classes: number of characters, see :func:`choose_characters`.
        size: height and width in pixels.

    Raises:
        XcompatError: not enough characters.
    """
    glyphs = render_glyphs(size)
    chosen = glyphs.select(choose_characters(glyphs, n_classes))
    fit = tuple(face for face in CLASS_FACES["train"] if face not in CLASS_FACES["validation"])
    with atomic_path(folder) as temporary:
        for name, faces in {**CLASS_FACES, "fit": fit}.items():
            _class_dataset(chosen, faces).save_to_disk(temporary / name)


def glyph_classes(part: str) -> Path:
    """Return the folder of ``glyphs:PART`` in a recipe, rendered on first use and cached.

    Args:
        part: ``train``, ``fit``, ``validation``, ``query`` or ``gallery``.

    Raises:
        XcompatError: the part is unknown.
    """
    import matplotlib

    parts = [*CLASS_FACES, "fit"]
    if part not in parts:
        raise XcompatError(f"unknown glyphs part {part!r}; {nearest(part, parts)}")
    made_by = f"{CLASS_FORMAT}-matplotlib-{matplotlib.__version__}"
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "xcompat" / f"glyph-classes-{made_by}"
    if not folder.exists():
        write_glyph_classes(folder)
    return folder / part


def choose_characters(glyphs: Glyphs, n_classes: int) -> list[int]:
    """Choose distinguishable characters with as many faces as possible.

    Candidates are in all twelve DejaVu faces; those in more STIX faces come first. Skips characters which two faces draw
    identically (e.g. most arrows), as a test image would be a training image. Of characters with an identical image (Latin A,
    Greek Alpha), only the first is kept.

    Args:
        glyphs: renderings in all faces.
        n_classes: number of characters.

    Returns:
        Code points, ascending.

    Raises:
        XcompatError: not enough characters.
    """
    images: dict[int, list[bytes]] = {code: [] for code in glyphs.names}
    dejavu = dict.fromkeys(glyphs.names, 0)
    for image_HW, code, face in zip(glyphs.images_NHW, glyphs.character_N.tolist(), glyphs.face_N.tolist(), strict=True):
        images[code].append(image_HW.tobytes())
        dejavu[code] += glyphs.faces[face].startswith("DejaVu")
    everywhere = sum(face.startswith("DejaVu") for face in glyphs.faces)
    seen: set[bytes] = set()
    chosen = []
    for code in sorted(images, key=lambda code: (-len(images[code]), code)):
        distinct = set(images[code])
        if dejavu[code] == everywhere and len(distinct) == len(images[code]) and seen.isdisjoint(distinct):
            chosen.append(code)
            seen |= distinct
    if not 1 < n_classes <= len(chosen):
        raise XcompatError(f"n_classes={n_classes} must be 2 to {len(chosen)}, the number of distinguishable characters")
    return sorted(chosen[:n_classes])


def _class_dataset(glyphs: Glyphs, faces: tuple[str, ...]) -> Dataset:
    """Convert renderings to labelled images, ordered by face as given, then by code point."""
    from datasets import ClassLabel, Dataset, Features, Value
    from datasets import Image as ImageFeature

    codes = sorted(glyphs.names)
    place = {glyphs.faces.index(face): number for number, face in enumerate(faces)}
    rows = [row for row, face in enumerate(glyphs.face_N.tolist()) if face in place]
    rows.sort(key=lambda row: (place[int(glyphs.face_N[row])], glyphs.character_N[row]))
    label_of = {code: label for label, code in enumerate(codes)}
    kept = [(int(glyphs.character_N[row]), glyphs.faces[glyphs.face_N[row]]) for row in rows]
    names = ClassLabel(names=[glyphs.names[code] for code in codes])
    columns = {
        IMAGE: [{"bytes": _png(glyphs.images_NHW[row]), "path": None} for row in rows],
        ID: [f"U+{code:04X} {face}" for code, face in kept],
        LABEL: [label_of[code] for code, _ in kept],
        CAPTION: [glyphs.names[code] for code, _ in kept],
    }
    features = Features({IMAGE: ImageFeature(), ID: Value("string"), LABEL: names, CAPTION: Value("string")})
    return Dataset.from_dict(columns, features=features)


def _png(image_HW: NDArray[np.uint8]) -> bytes:
    """Encode a grey image. Level 1 takes half the default time at nearly the same size."""
    from PIL import Image

    buffer = BytesIO()
    Image.fromarray(image_HW).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
