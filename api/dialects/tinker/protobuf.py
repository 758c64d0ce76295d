"""Encode fields of Protocol Buffers: the two wire types that Tinker's replies need. Pure."""

LENGTH_DELIMITED = 2


def varint(number: int) -> bytes:
    """Encode a number of at least 0, seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def number_field(field: int, number: int) -> bytes:
    """Encode a field of an integer or an enumeration. 0 is the default, which is left out."""
    return varint(field << 3) + varint(number) if number else b""


def bytes_field(field: int, content: bytes) -> bytes:
    """Encode a field of bytes, of a message, or of packed numbers."""
    return varint(field << 3 | LENGTH_DELIMITED) + varint(len(content)) + content
