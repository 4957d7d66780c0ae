"""An HTTP proxy before a real S3 server that is slow, answers 500 or 503, or loses answers; seeded."""

import http.client
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_HOP = {"connection", "keep-alive", "transfer-encoding"}
_ERROR = b"<Error><Code>%s</Code><Message>injected</Message></Error>"


class FaultProxy:
    """``share`` of the requests meet a fault of ``kind``: "500" and "503" never reach the server; "lost" does
    what was asked and then closes the connection; "slow" answers after ``delay`` seconds.
    """

    def __init__(self, port: int, upstream: int, seed: int):
        self.port, self.kind, self.share, self.delay, self.injected = port, "", 0.0, 0.3, 0
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler(upstream))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fault(self) -> str:
        with self._lock:
            if self._random.random() >= self.share:
                return ""
            self.injected += 1
            return self.kind

    def _handler(self, upstream: int) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy.fault()
                if fault == "slow":
                    time.sleep(proxy.delay)
                if fault in ("500", "503"):
                    name = b"InternalError" if fault == "500" else b"SlowDown"
                    self.answer(int(fault), [], _ERROR % name)
                    return
                server = http.client.HTTPConnection("127.0.0.1", upstream, timeout=60)
                try:
                    server.request(self.command, self.path, body, dict(self.headers.items()))
                    response = server.getresponse()
                    content = response.read()
                finally:
                    server.close()
                if fault == "lost":
                    self.close_connection = True
                    return
                self.answer(response.status, response.getheaders(), content)

            def answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
                self.send_response_only(status)
                length = None
                for name, value in headers:
                    if name.lower() == "content-length":
                        length = value
                    elif name.lower() not in _HOP:
                        self.send_header(name, value)
                head = self.command == "HEAD"
                self.send_header("Content-Length", (length or "0") if head else str(len(content)))
                self.end_headers()
                if not head:
                    self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do

        return Handler
