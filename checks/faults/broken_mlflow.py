"""MLflow servers that a run meets instead of a working one."""

import contextlib
import http.server
import socket
import threading
from collections.abc import Iterator

from tests.ports import free_port


@contextlib.contextmanager
def broken_mlflow(fault: str) -> Iterator[str]:
    """The address of one that refuses connections, that never answers, or that answers 500."""
    if fault == "MLflow refused":
        yield f"http://127.0.0.1:{free_port()}"
    elif fault == "MLflow hanging":
        with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
    else:
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Failing) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()


class _Failing(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(500)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass
