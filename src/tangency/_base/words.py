"""Somebody else's words on a terminal: what it would obey, and what cannot be seen, is shown and not done."""

# Characters of an exception's own text, or of a name, that a message has at most.
LONGEST = 2000


def plain(text: str) -> str:
    r"""One line: control characters, line ends and marks of direction among them, as escapes.

    >>> plain("a\x1b[2J\u202e\n")
    'a\\x1b[2J\\u202e\\n'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def lines(text: str) -> str:
    r"""The same of text with several lines, whose ends and tabs stay.

    >>> lines("a\nb\x9b")
    'a\nb\\x9b'
    """
    return "\n".join("\t".join(map(plain, line.split("\t"))) for line in text.split("\n"))


def said(error: BaseException) -> str:
    """What an error says, shortened: one of the user's may say a great deal, or fail at saying it."""
    try:
        text = str(error)
    except Exception as e:
        return f"(its text cannot be made: {type(e).__name__})"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)"


def short(name: str, most: int = 200) -> str:
    """A name in a message."""
    return name if len(name) <= most else f"{name[:most]}… ({len(name):,} characters)"
