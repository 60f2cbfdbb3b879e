"""What files and members of archives are called: to a reader of messages, and to themselves hidden."""

from __future__ import annotations

from lmapp.data.text import Reading

LISTED = 20
"""Names of what was left out that are kept; of the others it is known how many they are."""


def shown(name: str) -> str:
    """A name as it can be printed anywhere: control characters and the like as escapes."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in name)


def is_hidden(path: str) -> bool:
    """Whether a file or a directory on the way to it is hidden: .name, or what macOS adds to its archives."""
    parts = path.split("/")
    return any(part == "__MACOSX" or (part.startswith(".") and part not in (".", "..")) for part in parts)


def leave_out(name: str, reading: Reading) -> None:
    """Take down that something was not read."""
    reading.left_out_count += 1
    if len(reading.left_out) < LISTED:
        reading.left_out.append(shown(name))
