"""The languages that Qwen3-ASR names: codes, the unit that errors are counted in, and the scripts they use."""

import difflib
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from skirl.errors import DataError

__all__ = ["LANGUAGES", "Language", "count_scripts", "language_name", "script_of"]


@dataclass(frozen=True, slots=True)
class Language:
    """One language.

    Attributes:
        name: full English name, as the model writes it in its tag ("language English<asr_text>").
        codes: ISO 639-1 or -3 code first, then other codes and names in use, lower case, parts joined by "-".
        unit: what an error rate counts: "char" is CER, "word" is WER.
        scripts: Unicode scripts its native words are written in; Latin letters may stand in any text beside them.
    """

    name: str
    codes: tuple[str, ...]
    unit: Literal["char", "word"]
    scripts: tuple[str, ...]


_ALL = (
    Language("Arabic", ("ar", "ara", "arb"), "word", ("Arabic",)),
    Language("Cantonese", ("yue", "zh-yue", "zh-hk", "zh-hant-hk"), "char", ("Han",)),
    Language("Chinese", ("zh", "zho", "chi", "cmn", "mandarin"), "char", ("Han",)),
    Language("Czech", ("cs", "ces", "cze"), "word", ("Latin",)),
    Language("Danish", ("da", "dan"), "word", ("Latin",)),
    Language("Dutch", ("nl", "nld", "dut"), "word", ("Latin",)),
    Language("English", ("en", "eng"), "word", ("Latin",)),
    Language("Filipino", ("fil", "tl", "tgl", "tagalog"), "word", ("Latin",)),
    Language("Finnish", ("fi", "fin"), "word", ("Latin",)),
    Language("French", ("fr", "fra", "fre"), "word", ("Latin",)),
    Language("German", ("de", "deu", "ger"), "word", ("Latin",)),
    Language("Greek", ("el", "ell", "gre"), "word", ("Greek",)),
    Language("Hindi", ("hi", "hin"), "word", ("Devanagari",)),
    Language("Hungarian", ("hu", "hun"), "word", ("Latin",)),
    Language("Indonesian", ("id", "ind"), "word", ("Latin",)),
    Language("Italian", ("it", "ita"), "word", ("Latin",)),
    Language("Japanese", ("ja", "jpn"), "char", ("Han", "Hiragana", "Katakana")),
    Language("Korean", ("ko", "kor"), "word", ("Hangul", "Han")),
    Language("Macedonian", ("mk", "mkd", "mac"), "word", ("Cyrillic",)),
    Language("Malay", ("ms", "msa", "may", "zsm"), "word", ("Latin",)),
    Language("Persian", ("fa", "fas", "per", "pes", "farsi"), "word", ("Arabic",)),
    Language("Polish", ("pl", "pol"), "word", ("Latin",)),
    Language("Portuguese", ("pt", "por"), "word", ("Latin",)),
    Language("Romanian", ("ro", "ron", "rum"), "word", ("Latin",)),
    Language("Russian", ("ru", "rus"), "word", ("Cyrillic",)),
    Language("Spanish", ("es", "spa"), "word", ("Latin",)),
    Language("Swedish", ("sv", "swe"), "word", ("Latin",)),
    Language("Thai", ("th", "tha"), "char", ("Thai",)),
    Language("Turkish", ("tr", "tur"), "word", ("Latin",)),
    Language("Vietnamese", ("vi", "vie"), "word", ("Latin",)),
)

LANGUAGES: Mapping[str, Language] = MappingProxyType({language.name: language for language in _ALL})
"""Full English name -> language."""

_NAMES = {language.name.lower(): language.name for language in _ALL} | {
    code: language.name for language in _ALL for code in language.codes
}
_UNKNOWN = frozenset({"", "none", "null", "unknown", "und", "mul"})

# First words of Unicode character names that are not the name of the script.
_SCRIPT_OF_FIRST_WORD = {
    "CJK": "Han",
    "IDEOGRAPHIC": "Han",
    "KATAKANA-HIRAGANA": "Katakana",
    "MODIFIER": None,
    "MASCULINE": "Latin",
    "FEMININE": "Latin",
    "MICRO": None,
}


def language_name(code_or_name: str | None) -> str | None:
    """Full English name of a language.

    Args:
        code_or_name: ISO 639 code, BCP 47 tag (region and script are ignored, but zh-HK is Cantonese, as speech data
            sets use it) or English name, in any case; "_" counts as "-".

    Returns:
        A key of ``LANGUAGES``; None for what says "not known": None, "", "None", "unknown", "und", "mul".

    Raises:
        DataError: the language is not in the table; the message lists the nearest entries.
    """
    if code_or_name is None:
        return None
    tag = code_or_name.strip().lower().replace("_", "-")
    if tag in _UNKNOWN:
        return None
    parts = tag.split("-")
    for length in range(len(parts), 0, -1):
        name = _NAMES.get("-".join(parts[:length]))
        if name is not None:
            return name
    near = dict.fromkeys(_NAMES[key] for key in difflib.get_close_matches(tag, _NAMES, n=3, cutoff=0.5))
    meant = f"; nearest: {', '.join(f'{name} ({LANGUAGES[name].codes[0]})' for name in near)}" if near else ""
    raise DataError(
        f"language {code_or_name!r} is not known{meant}. "
        f"Use a code or a full English name out of: {', '.join(LANGUAGES)}; or leave it empty if it is not known."
    )


@lru_cache(maxsize=65536)
def script_of(char: str) -> str | None:
    """Unicode script of one letter ("Latin", "Han", "Hiragana", ...); None for digits, marks, punctuation and space."""
    if not unicodedata.category(char).startswith("L"):
        return None
    words = unicodedata.name(char, "").split()
    if words and words[0] in {"FULLWIDTH", "HALFWIDTH"}:
        words = words[1:]
    if not words:
        return None
    return _SCRIPT_OF_FIRST_WORD.get(words[0], words[0].capitalize())


def count_scripts(text: str) -> Counter[str]:
    """Number of letters of each script in a text."""
    return Counter(script for script in map(script_of, text) if script is not None)
