"""What does the file of a torch ``FileStore`` hold? Read without writing to it, as that class itself cannot."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_KEY: Final = "/"  # before a key that is set
_DELETED: Final = "-/"  # before one that is deleted
_LONGEST: Final = 1 << 16  # bytes of a key that can be meant


class StoreFile:
    """The keys below `root` of a FileStore; `check` and `get` as torch's stores have them.

    The file only grows, by records of length, key, length, value; the last one of a key counts. A record that is being
    written is read at the next look. The format is torch's own (2.11-2.15, ``c10d/FileStore.cpp``), and tested against
    that class.

    Raises:
        ValueError: from `check` and `get`, when the file is no FileStore's.
        OSError: from the same, when it cannot be read.
    """

    def __init__(self, path: str, root: str) -> None:
        self._path = Path(path)
        self._root = (f"{_KEY}{root}".encode(), f"{_DELETED}{root}".encode())
        self._held: dict[str, bytes] = {}
        self._at = 0

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there now."""
        self._read()
        return all(key in self._held for key in keys)

    def get(self, key: str) -> bytes:
        """The value of a key that `check` found."""
        return self._held[key]

    def _read(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        place = 0
        while len(data) >= place + 4:
            if struct.unpack_from("<I", data, place)[0] > _LONGEST:
                raise ValueError(f"{self._path} is no file of a torch FileStore")
            key = _text(data, place)
            if key is None:
                break
            value = _text(data, place + 4 + len(key))
            if value is None:
                break
            place += 8 + len(key) + len(value)
            if key.startswith(self._root):
                name = key.decode().removeprefix(_DELETED).removeprefix(_KEY)
                if key.startswith(self._root[0]):
                    self._held[name] = value
                else:
                    self._held.pop(name, None)
        self._at += place


def _text(data: bytes, place: int) -> bytes | None:
    """The bytes whose length stands at `place`; None while they are not all there."""
    if place + 4 > len(data):
        return None
    (length,) = struct.unpack_from("<I", data, place)
    end = place + 4 + length
    return data[place + 4 : end] if end <= len(data) else None
