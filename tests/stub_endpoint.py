"""An OpenAI-compatible endpoint on loopback that answers what a test wants: no model, no network."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StubEndpoint(ThreadingHTTPServer):
    """Answers request i with `replies[i]`, the last one for ever: a status code, a text, a dict or bytes as the whole
    body, or a number of seconds between the bytes of a body that has no end.

    `requests` holds the headers (names in lower case) and the body of every request.
    """

    def __init__(self, replies: Sequence[int | str | dict | None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies, self.requests = list(replies), []

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: StubEndpoint

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
        reply = self.server.replies[min(len(self.server.requests), len(self.server.replies)) - 1]
        if isinstance(reply, int):
            # As OpenAI does, with the key in the message
            quoted = {"error": {"message": f"status {reply} for {self.headers['authorization']}", "type": "stub"}}
            self._send(reply, quoted)
        elif isinstance(reply, dict | bytes):
            self._send(200, reply)
        elif isinstance(reply, float):
            self._drip(reply)
        else:
            message = {"role": "assistant", "content": reply}
            usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self._send(
                200,
                {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "stub",
                    "choices": [choice],
                    "usage": usage,
                },
            )

    def _drip(self, seconds: float) -> None:
        """A byte at a time, for ever."""
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", "1000000")
        self.end_headers()
        with suppress(OSError):  # nobody listens any more
            while True:
                self.wfile.write(b" ")
                time.sleep(seconds)

    def _send(self, status: int, content: dict | bytes) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def stub_endpoint(*replies: int | str | dict | None) -> Iterator[StubEndpoint]:
    server = StubEndpoint(replies)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
