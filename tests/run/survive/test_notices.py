"""Preemption notices, against a server on this machine that answers as the clouds' metadata servers do."""

import http.server
import threading

import pytest

from jaxlm.run.survive import farewell


class Metadata(http.server.BaseHTTPRequestHandler):
    preempted, tokens, asked = False, 0, 0

    def do_PUT(self):
        assert self.path == "/latest/api/token"
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        type(self).tokens += 1
        self._answer(200, f"token{self.tokens}")

    def do_GET(self):
        type(self).asked += 1
        if self.path == "/computeMetadata/v1/instance/preempted":
            if self.headers["Metadata-Flavor"] != "Google":
                return self._answer(403, "")
            return self._answer(200, "TRUE" if self.preempted else "FALSE")
        assert self.path == "/latest/meta-data/spot/instance-action"
        if self.headers["X-aws-ec2-metadata-token"] != f"token{self.tokens}" or (self.tokens == 1 and self.asked == 2):
            return self._answer(401, "")
        found = '{"action": "terminate",\n "time": "2026-11-22T08:22:00Z"}'
        return self._answer(200, found) if self.preempted else self._answer(404, "")

    def _answer(self, code, text):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    handler = type("Fresh", (Metadata,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # never asked
    yield handler
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("cloud", "words"),
    [
        ("gce", "Google Compute Engine takes this machine away (preempted)"),
        ("aws", 'AWS takes this machine away ({"action": "terminate", "time": "2026-11-22T08:22:00Z"})'),
    ],
)
def test_a_notice_acts_once(server, cloud, words):
    said, acted = [], threading.Event()
    over = farewell.watch_for_notices([cloud], acted.set, said.append, every_s=0.01)
    while server.asked < 4:
        assert not acted.wait(0.01)
    server.preempted = True
    assert acted.wait(5)
    assert said[-1].startswith(words)
    assert server.tokens == (2 if cloud == "aws" else 0)  # the first token ran out
    over()


def test_a_cloud_that_does_not_answer_is_said_once(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    said = []
    over = farewell.watch_for_notices(["gce"], pytest.fail, said.append, every_s=0.01)
    threading.Event().wait(0.2)
    over()
    (line,) = said
    assert line.startswith("runs.notices=gce: no answer from http://127.0.0.1:1 (")
