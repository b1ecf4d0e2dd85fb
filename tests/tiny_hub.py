"""A hub on this machine, of which `huggingface_hub` can make repositories and fill them: create, preupload, LFS, commit."""

import base64
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator

TOKEN = "hf_tokenofatest"


class Hub(http.server.ThreadingHTTPServer):
    """Attributes:
    repos: name -> {"private", "files": path -> bytes}; `stored`: LFS objects by sha256, each sent once or more (`puts`).
    most: objects that it takes before it refuses all others, as a cut connection does.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos, self.stored, self.puts, self.most, self.lock = {}, {}, [], 1000, threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, content: object, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        repo = self.server.repos.get(self.path.removeprefix("/api/models/").partition("/revision")[0])
        if repo is None:
            return self.answer({}, 404)
        names = [{"rfilename": name} for name in repo["files"]]
        self.answer({"id": "me/x", "private": repo["private"], "siblings": names})

    def do_PUT(self) -> None:
        content, oid = self.rfile.read(int(self.headers["Content-Length"])), self.path.rpartition("/")[2]
        with self.server.lock:
            self.server.puts.append(oid)
            if len(self.server.stored) >= self.server.most:
                return self.answer({}, 400)
            self.server.stored[oid] = content
        self.answer({})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid username or password."}, 401)
        if self.path.endswith("/validate-yaml"):
            return self.answer({"errors": [], "warnings": []})
        lines = [json.loads(line) for line in content.splitlines()]
        if self.path == "/api/repos/create":
            name = f"{lines[0]['organization']}/{lines[0]['name']}"
            if name in self.server.repos:
                return self.answer({"url": f"{self.server.url}/{name}"}, 409)
            self.server.repos[name] = {"private": lines[0].get("visibility") == "private", "files": {}}
            return self.answer({"url": f"{self.server.url}/{name}"})
        if "/preupload/" in self.path:
            kinds = {name: "lfs" if name.endswith((".safetensors", ".gguf")) else "regular" for name in paths(lines[0])}
            files = [{"path": name, "uploadMode": kind, "shouldIgnore": False} for name, kind in kinds.items()]
            return self.answer({"files": files})
        if self.path.endswith("/objects/batch"):
            objects = [dict(each) for each in lines[0]["objects"]]
            for each in objects:
                if each["oid"] not in self.server.stored:
                    each["actions"] = {"upload": {"href": f"{self.server.url}/put/{each['oid']}"}}
            return self.answer({"objects": objects})
        files = self.server.repos["/".join(self.path.split("/")[3:5])]["files"]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                files[value["path"]] = self.server.stored[value["oid"]]
        url = f"{self.server.url}/{'/'.join(self.path.split('/')[3:5])}/commit/1"
        self.answer({"commitUrl": url, "commitOid": "1", "success": True})


def paths(content: dict) -> list[str]:
    return [file["path"] for file in content["files"]]


@contextlib.contextmanager
def started() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
