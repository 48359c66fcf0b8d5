"""How codegen refuses input: one exception type, one wording (what, value, rule, cure)."""

import difflib
from collections.abc import Iterable


class CodegenError(ValueError):
    """The input was refused; the message says what, its value, the rule and the cure."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` for the known word most like `word`, or an empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def unknown(what: str, value: str, known: Iterable[str]) -> CodegenError:
    """Build the error for a word that is not one of a closed list."""
    known = list(known)
    return CodegenError(
        f"{what} is {value!r}, but must be one of {', '.join(known)}{nearest(value, known)}"
    )
