"""WET archives as Common Crawl writes them: each page in a gzip member of its own, with the SHA-1 of its text."""

import base64
import gzip
import hashlib
from collections.abc import Iterable
from pathlib import Path


def write_wet(path: Path, pages: Iterable[tuple[str, str]], level: int = 6) -> None:
    """Writes an archive of `pages`, each a URL and a text. `level`: of gzip."""
    with path.open("wb") as file:
        for number, (url, text) in enumerate(pages):
            block = text.encode()
            fields = {
                "WARC-Type": "conversion",
                "WARC-Target-URI": url,
                "WARC-Date": "2019-07-17T12:15:59Z",
                "WARC-Record-ID": f"<urn:uuid:00000000-0000-4000-8000-{number:012}>",
                "WARC-Refers-To": f"<urn:uuid:00000000-0000-4000-8001-{number:012}>",
                "WARC-Block-Digest": f"sha1:{base64.b32encode(hashlib.sha1(block).digest()).decode()}",
                "WARC-Identified-Content-Language": "eng",
                "Content-Type": "text/plain",
                "Content-Length": str(len(block)),
            }
            header = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            file.write(gzip.compress(f"WARC/1.0\r\n{header}\r\n".encode() + block + b"\r\n\r\n", level))
