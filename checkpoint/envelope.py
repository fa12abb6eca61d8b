r"""The wrapping of every JSON file of a run: format number and hash around a body.

    {"xxh3_128":"<32 hex digits>","format":1,"body":{...}}\n

The hash covers every byte after its own field, so a flipped byte anywhere is either a wrong hash or no envelope; the
hash comes first and never moves, so that any version can tell a newer format from a damaged file.
"""

import re
from typing import TypeVar

import msgspec
import xxhash

from trainerd.checkpoint.errors import Damaged, FormatTooNew
from trainerd.checkpoint.layout import FORMAT

Body = TypeVar("Body")

_HASH = re.compile(rb'\{"xxh3_128":"([0-9a-f]{32})",')
_HASHED_FROM = len('{"xxh3_128":"",') + 32


class _Sealed(msgspec.Struct):
    format: int
    body: msgspec.Raw


class _NewerBody(msgspec.Struct):
    written_by: str = ""


def seal(body: object) -> bytes:
    """The file's bytes for a body that msgspec can encode."""
    rest = b'"format":%d,"body":%s}\n' % (FORMAT, msgspec.json.encode(body))
    return b'{"xxh3_128":"%s",%s' % (xxhash.xxh3_128_hexdigest(rest).encode(), rest)


def unseal(data: bytes, body_type: type[Body], place: str) -> Body:
    """The body of a sealed file. Damaged if a byte is not what was written, FormatTooNew for other formats."""
    match = _HASH.match(data)
    if match is None:
        raise Damaged(place, "it does not begin like a file of trainerd")
    if xxhash.xxh3_128_hexdigest(memoryview(data)[_HASHED_FROM:]).encode() != match[1]:
        raise Damaged(place, "its content does not match its hash")
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        if sealed.format != FORMAT:
            raise FormatTooNew(place, sealed.format, msgspec.json.decode(sealed.body, type=_NewerBody).written_by)
        return msgspec.json.decode(sealed.body, type=body_type)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Damaged(
            place, f"its hash is right, but its content is not what format {FORMAT} allows: {error}"
        ) from None
