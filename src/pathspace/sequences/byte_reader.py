"""Numbers in compressed files: varints, seven bits a byte, the lowest first."""

from __future__ import annotations


class CorruptedError(ValueError):
    """A compressed file is damaged, or does not belong to the model."""


def varint(value: int) -> bytes:
    r"""Return the bytes of a number.

    Example:
        >>> varint(300)
        b'\xac\x02'
    """
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class ByteReader:
    """The bytes of a file, from front to back.

    Args:
        content: the bytes.
        place: where to begin.
    """

    def __init__(self, content: bytes, place: int = 0) -> None:
        self._content = content
        self._place = place

    @property
    def place(self) -> int:
        """The number of bytes read so far."""
        return self._place

    @property
    def is_at_end(self) -> bool:
        """True if no byte is left."""
        return self._place >= len(self._content)

    def varint(self) -> int:
        """Return the next number; raises CorruptedError if there is none."""
        value = 0
        shift = 0
        while True:
            if self.is_at_end or shift > 63:
                raise CorruptedError("the compressed file ends too early")
            byte = self._content[self._place]
            self._place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def take(self, size: int) -> bytes:
        """Return the next bytes; raises CorruptedError if there are not as many."""
        taken = self._content[self._place : self._place + size]
        if len(taken) < size:
            raise CorruptedError("the compressed file ends too early")
        self._place += size
        return taken

    def rest(self) -> bytes:
        """Return all that is left."""
        return self._content[self._place :]
