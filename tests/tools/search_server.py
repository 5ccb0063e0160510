"""A real server on this machine that searches, and misbehaves as it is told; for tests of `http`."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Says:
    """One answer: to `rows` of passages, or anything else."""

    def __init__(self, body=None, status=200, after=None, pieces=None, drop=False, **headers):
        self.data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.status, self.headers = status, {k.replace("_", "-"): v for k, v in headers.items()}
        self.after, self.pieces, self.drop = after, pieces, drop


def passages(*texts):
    return Says({"passages": [{"id": f"d{i}", "text": t, "score": 1 - i / 4} for i, t in enumerate(texts)]})


class Server(ThreadingHTTPServer):
    """Searches by what `answer(request)` says; keeps what it was asked."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer):
        self.answer, self.asked, self.times = answer, [], []
        self.now = self.most = 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/search"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, request, client_address):
        """The client went away."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server  # type: ignore[assignment]

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        asked = {"path": parts.path, "params": parse_qs(parts.query), "headers": dict(self.headers),
                 "method": self.command, "body": json.loads(body) if body else None}  # fmt: skip
        server = self.server
        with server.lock:
            server.asked.append(asked)
            server.times.append(time.monotonic())
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            self.say(server.answer(asked) if callable(server.answer) else server.answer)
        finally:
            with server.lock:
                server.now -= 1

    do_GET = do_POST

    def say(self, says):
        if says.after is not None:
            says.after.wait(20)
        self.send_response(says.status)
        for name, value in says.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(says.data)))
        self.end_headers()
        if says.drop:
            self.wfile.write(says.data[:3])
            self.close_connection = True
            return
        size = says.pieces or len(says.data) or 1
        for start in range(0, len(says.data), size):
            self.wfile.write(says.data[start : start + size])
            if says.pieces:
                time.sleep(0.05)

    def log_message(self, format, *args):
        """Quiet."""
