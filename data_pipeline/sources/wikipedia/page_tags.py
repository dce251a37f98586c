"""The tags at which the pages of a MediaWiki export begin and end, found in its bytes without parsing.

"<" is always written "&lt;" inside a page's text, so these tags are reliable even in a damaged page: after a page that
no XML parser accepts, a reader continues at the next tag found here.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

PAGE, END, ROOT = b"<page", b"</page>", b"<mediawiki"

_TAG = re.compile(rb"<(?:/page\s*>|(?:page|mediawiki)(?=[\s/>]))")
_LONGEST = 64  # the most bytes of a tag that a chunk may cut


class Tag(NamedTuple):
    """A tag and the bytes before it.

    `before` has the bytes since the last tag. `name` is PAGE, END, ROOT, or b"" for more text without a tag. `position`
    counts from the first byte given. `beyond`: the tag begins in a chunk beyond the range.
    """

    before: bytes
    name: bytes
    position: int
    beyond: bool


def page_tags(chunks: Iterable[tuple[bytes, bool]]) -> Iterator[Tag]:
    """The tags in chunks of XML, (bytes, whether beyond the range), with all bytes between them.

    [(b"<mediawiki><pa", False), (b"ge>a</page>", True)]  ->  Tag(b"", ROOT, 0, False), Tag(b">", PAGE, 11, False),
    Tag(b">a", END, 18, True)
    """
    base, rest, boundary = 0, b"", None
    for chunk, beyond in chunks:
        if beyond and boundary is None:
            boundary = base + len(rest)
        data = rest + chunk
        done = 0
        for tag in _TAG.finditer(data):
            name = END if tag[0].startswith(b"</") else tag[0]
            position = base + tag.start()
            yield Tag(data[done : tag.start()], name, position, boundary is not None and position >= boundary)
            done = tag.end()
        cut = data.rfind(b"<", done)
        if cut < 0 or len(data) - cut >= _LONGEST:
            cut = len(data)
        if cut > done:
            yield Tag(data[done:cut], b"", base + cut, boundary is not None)
        base, rest = base + cut, data[cut:]
    yield Tag(rest, b"", base + len(rest), boundary is not None)
