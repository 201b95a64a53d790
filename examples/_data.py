"""What the example trains on: real text that is on any machine with Python.

The text is the source of Python's own standard library, the top-level ``*.py`` files in alphabetical order, read
from the folder that ``sysconfig.get_paths()["stdlib"]`` names. Nothing is downloaded. A token is a byte; every
window starts with one extra token, so the vocabulary has 257 entries and its shards are uneven on 2 or 4 ranks.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

BYTES = 256
START = BYTES
"""The token that opens every window."""
VOCABULARY = BYTES + 1


def read_text(limit: int = 1 << 20) -> bytes:
    """Return up to ``limit`` bytes of the standard library's sources, the same on every call.

    Raises
    ------
    FileNotFoundError
        The standard library of this Python has no source files (it lives in an archive, say).
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise FileNotFoundError(
            f"expected Python's standard library as *.py files in {folder}, found none: "
            "run the example with a Python whose standard library is a folder of sources"
        )
    return bytes(text[:limit])


@dataclass(frozen=True, slots=True)
class Text:
    """Byte-level text cut into windows of ``window`` tokens, handed out in file order.

    ``tokens`` is uint8 of shape ``[n]``. Which window a batch holds depends only on the step, the micro-batch and
    the data-parallel rank, so a resumed run reads on exactly where the saved one stopped.
    """

    tokens: Tensor
    window: int

    @staticmethod
    def load(window: int) -> Text:
        return Text(torch.frombuffer(bytearray(read_text()), dtype=torch.uint8), window)

    def batch(self, number: int, size: int, *, part: int, parts: int) -> tuple[Tensor, Tensor]:
        """Return ``(inputs, targets)``, int64 of shape ``[size, window]``, of the batch with this running number.

        ``parts`` data-parallel ranks share a batch number; ``part`` is this rank's place among them.
        """
        windows = self.tokens.numel() // self.window
        first = (number * parts + part) * size
        rows = [(first + row) % windows for row in range(size)]
        targets = torch.stack([self.tokens[row * self.window : (row + 1) * self.window] for row in rows]).long()
        start = torch.full((size, 1), START, dtype=torch.long)
        return torch.cat([start, targets[:, :-1]], dim=1), targets
