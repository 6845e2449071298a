"""The embedded data: every named character of the fonts that matplotlib ships, as an image and a caption."""

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
from PIL import Image, ImageFont

from xcompat.errors import XcompatError

if TYPE_CHECKING:
    from datasets import Dataset
    from numpy.typing import NDArray

REGULAR_FACES = ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif", "STIXGeneral")
"""The upright regular faces, one per design: what the quickstart's old model knows and its galleries hold."""

_PATTERNS = ("DejaVu*.ttf", "STIXGeneral*.ttf")
_EM = 26 / 32  # font size over image size: DejaVu's tallest accents and deepest descenders just fit
_BASELINE = 25 / 32
# Families whose names are running numbers; "braille pattern dots-125" and "domino tile" describe what is seen.
_NUMBERED = re.compile(
    r"^(CJK \w+ IDEOGRAPH|TANGUT \w+|NUSHU CHARACTER|KHITAN SMALL SCRIPT CHARACTER|CYPRO-MINOAN SIGN|VARIATION SELECTOR)-"
    r"|^HANGUL SYLLABLE |^(EGYPTIAN|ANATOLIAN) HIEROGLYPH [A-Z]+\d|^LINEAR [AB] \w+ [A-Z]+\d|^GREEK \w+ NOTATION SYMBOL-"
)


@dataclass(frozen=True)
class Glyphs:
    """Renderings of characters, in order of face and code point.

    Args:
        images_NHW: grey images, uint8, ink 255 on 0.
        character_N: the code point of each image, int32.
        face_N: index into ``faces`` of each image, int32.
        faces: names of the font faces.
        names: caption (the lower-cased Unicode name) of each code point.
    """

    images_NHW: NDArray[np.uint8]
    character_N: NDArray[np.int32]
    face_N: NDArray[np.int32]
    faces: list[str]
    names: dict[int, str]

    def select(self, characters: Iterable[int], faces: Collection[str] | None = None) -> Glyphs:
        """Keep the renderings of some characters in some faces.

        Args:
            characters: code points to keep.
            faces: names of faces to keep; all if None.

        Returns:
            The selection, in the same order; ``faces`` stays whole so that indices keep their meaning.

        Raises:
            XcompatError: a face that was not rendered.
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

    Size and place are kept, since they tell a comma from an apostrophe and one braille dot from another; what is wider or
    taller than the image is shrunk into it. Blank glyphs (spaces, controls) and the ``.notdef`` box are left out, and so are
    the two Display faces, which hold a few dozen characters.

    Args:
        size: height and width of the images in pixels.

    Returns:
        About 54,000 renderings of about 7,300 characters in 16 faces.

    Example:
        >>> glyphs = render_glyphs(16)
        >>> glyphs.images_NHW.shape[1:], len(glyphs.faces), glyphs.names[0x3B1]
        ((16, 16), 16, 'greek small letter alpha')
    """
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
    """Find the 16 faces in matplotlib's data folder, sorted by name."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    paths = sorted(path for pattern in _PATTERNS for path in folder.glob(pattern) if "Display" not in path.stem)
    if missing := set(REGULAR_FACES) - {path.stem for path in paths}:
        raise XcompatError(f"matplotlib's font folder {folder} lacks {min(missing)}.ttf; reinstall matplotlib")
    return paths


def _mapped_characters(path: Path) -> list[int]:
    """List the code points that a font maps to a real glyph, ascending."""
    from fontTools.ttLib import TTFont

    with TTFont(path, lazy=True) as font:
        return sorted(code for code, glyph in font.getBestCmap().items() if glyph != ".notdef")


def _render(font: ImageFont.FreeTypeFont, character: str, size: int) -> NDArray[np.uint8] | None:
    """Draw one character on its baseline, its advance width centred; None if there is no ink."""
    mask, (left, top) = font.getmask2(character, mode="L", anchor="ms")
    width, height = mask.size
    if not width or not height:
        return None
    ink_HW = np.array(mask, dtype=np.uint8).reshape(height, width)
    if not ink_HW.any():
        return None
    if max(width, height) > size:
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
    """Split by character: no face of a test character is ever trained on.

    Test characters are drawn among those that a regular face has, so each can be found in a gallery of the regular faces.

    Args:
        glyphs: the renderings.
        n_test: how many characters to hold out.
        seed: of the draw.

    Returns:
        Training and test code points, each ascending.

    Raises:
        XcompatError: fewer candidates than ``n_test``.
    """
    regular = [glyphs.faces.index(face) for face in REGULAR_FACES]
    candidates = np.unique(glyphs.character_N[np.isin(glyphs.face_N, regular)])
    if not 0 < n_test < len(candidates):
        raise XcompatError(f"n_test={n_test} characters cannot be held out of {len(candidates)}; choose fewer, at least 1")
    test = np.sort(np.random.default_rng(seed).permutation(candidates)[:n_test])
    return np.setdiff1d(glyphs.character_N, test), test


def unicode_corpus(exclude: Iterable[str] = ()) -> list[str]:
    """List the lower-cased Unicode names that describe a character rather than number it.

    Ideographs, Hangul syllables, hieroglyphs and the like, whose names are running numbers, are left out.

    Args:
        exclude: captions that must not be in the corpus, such as those of the test characters.

    Returns:
        Distinct names in order of code point.

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
    """Turn renderings into an image-caption data set; the faces of one character share an id.

    Args:
        glyphs: the renderings, usually a :meth:`Glyphs.select`-ion.

    Returns:
        Columns ``image`` (grey PNG), ``caption``, ``id`` (such as ``"U+03B1"``) and ``face``.
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


def _png(image_HW: NDArray[np.uint8]) -> bytes:
    """Encode a grey image fast: level 1 is half the time of the default and hardly larger."""
    buffer = BytesIO()
    Image.fromarray(image_HW).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
