"""The page over HTTP: who is let in, what is refused, and that nobody who is slow or gone holds up anybody."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("starlette", reason="the extra view is not installed")

from starlette.testclient import TestClient

from regard.viewer import server
from regard.viewer.bundle import TYPES, joined
from regard.viewer.session import Session
from viewing import observed_session, served

TOKEN = "t" * 22
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def session():
    return observed_session(300)[0]


@pytest.fixture
def client(session):
    return TestClient(
        server.application(session, TOKEN), base_url="http://127.0.0.1:4321", raise_server_exceptions=False
    )


def parts(content):
    size = int.from_bytes(content[:4], "little")
    assert (4 + size) % 8 == 0
    return json.loads(content[4 : 4 + size]), content[4 + size :]


def test_an_answer_over_http_is_that_of_the_session(client, session):
    params = {"layer": 0, "head": 1, "level": 0, "row": 1, "column": 0}
    answer = client.post(f"/{TOKEN}/api/tile", json=params)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/octet-stream"
    assert parts(answer.content) == session.handle("tile", params)


def test_whoever_does_not_know_the_token_is_refused(client):
    for path in ("/x/", "/x/static/main.js", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/"):
        assert client.get(path).status_code == 403, path
    assert client.post("/x/api/info", json={}).status_code == 403
    for path in ("/", f"/{TOKEN}", f"/{TOKEN}/api/info", "/favicon.ico"):
        assert client.get(path).status_code in (404, 405), path


def test_another_host_is_refused_and_so_is_another_page(client):
    for host in ("evil.example", "evil.example:4321", "127.0.0.1.evil.example", "0.0.0.0", ""):
        assert client.get(f"/{TOKEN}/", headers={"host": host}).status_code == 400, host
    assert client.post(f"/{TOKEN}/api/info", json={}, headers={"host": "localhost:4321"}).status_code == 200
    asked = {"origin": "http://evil.example"}
    assert client.post(f"/{TOKEN}/api/info", json={}, headers=asked).status_code == 403
    assert client.post(f"/{TOKEN}/api/info", json={}, headers={"origin": "http://127.0.0.1:4321"}).status_code == 200


def test_no_other_page_can_ask_without_a_question_of_the_browser_which_is_not_answered(client):
    # a form or a plain fetch of another page may send text/plain; JSON makes the browser ask first
    answer = client.post(f"/{TOKEN}/api/info", content="{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    first = client.options(f"/{TOKEN}/api/info", headers={"origin": "http://evil.example"})
    assert first.status_code == 405
    for answer in (first, client.post(f"/{TOKEN}/api/info", json={})):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_every_answer_has_a_strict_policy(client):
    answers = [
        client.get(f"/{TOKEN}/"),
        client.get("/x/"),
        client.get(f"/{TOKEN}/", headers={"host": "evil.example"}),
        client.post(f"/{TOKEN}/api/nothing", json={}),
    ]
    for answer in answers:
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["form-action"] == "'none'"
        assert "unsafe" not in str(policy)
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


def test_no_path_reaches_the_file_system(client, monkeypatch):
    for name in (
        "../session.py",
        "..%2fsession.py",
        "%2e%2e/session.py",
        "/etc/passwd",
        "..",
        ".",
        "main.js%00",
        "a/b.js",
    ):
        answer = client.get(f"/{TOKEN}/static/{name}")
        assert answer.status_code == 404, name
    known = server.files()
    monkeypatch.setattr(Path, "open", None)
    monkeypatch.setattr(Path, "read_bytes", None)
    for name, data in known.items():
        answer = client.get(f"/{TOKEN}/static/{name}")
        assert answer.content == data
        assert answer.headers["content-type"].split(";")[0] == TYPES[Path(name).suffix]


def test_a_question_that_is_too_large_or_no_question_is_refused(client, monkeypatch):
    monkeypatch.setattr(server, "MAX_REQUEST_BYTES", 1000)
    large = b'{"text": "' + b"x" * 1000 + b'"}'
    told = client.post(f"/{TOKEN}/api/search", content=large, headers=JSON)
    assert told.status_code == 413

    def in_parts():
        for _ in range(4):
            yield large[:300]

    assert client.post(f"/{TOKEN}/api/search", content=in_parts(), headers=JSON).status_code == 413
    for content in (b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 900, b"NaN"):
        answer = client.post(f"/{TOKEN}/api/info", content=content, headers=JSON)
        assert answer.status_code == 400, content
        assert answer.json()["error"]
    assert client.post(f"/{TOKEN}/api/nothing", json={}).status_code == 404
    wrong = client.post(f"/{TOKEN}/api/tile", json={"layer": 99, "head": 0})
    assert (wrong.status_code, wrong.json()["error"]) == (400, "layer must be 0 to 0, got 99")


def ask_at(address, method, params, timeout=10):
    with urlopen(Request(f"{address}api/{method}", json.dumps(params).encode(), JSON), timeout=timeout) as answer:
        return answer.read()


def connected(address):
    host, port = re.fullmatch(r"http://([\d.]+):(\d+)/.*", address).groups()
    return socket.create_connection((host, int(port)), timeout=10)


def test_it_listens_on_this_machine_alone_at_an_address_that_is_new_each_time(session):
    with served(session) as one, served(session) as other:
        tokens = [
            re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{22,})/", address).groups() for address in (one, other)
        ]
        assert tokens[0] != tokens[1]
        with connected(one) as connection:
            assert connection.getpeername()[0] == "127.0.0.1"


class Counted(Session):
    """A session that counts what it computes, and takes its time."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.asked = seconds, []

    def handle(self, method, params):
        self.asked.append(params.get("n"))
        time.sleep(self.seconds)
        return {"n": params.get("n")}, b"x" * params.get("size", 0)


def post(connection, address, params):
    body = json.dumps(params).encode()
    path = "/" + address.split("/", 3)[3]
    head = f"POST {path}api/tile HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def test_questions_whose_asker_has_gone_are_never_computed():
    counted = Counted(0.3)
    with served(counted) as address:
        first = connected(address)
        post(first, address, {"n": 0})
        while not counted.asked:
            time.sleep(0.01)
        gone = [connected(address) for _ in range(10)]  # ten tabs, of which nine are closed at once
        for n, connection in enumerate(gone, start=1):
            post(connection, address, {"n": n})
        time.sleep(0.1)
        for connection in gone[:9]:
            connection.close()
        answer = HTTPResponse(gone[9])
        answer.begin()
        assert parts(answer.read())[0] == {"n": 10}
        gone[9].close()
        assert counted.asked == [0, 10]
        first.close()


def test_a_small_answer_does_not_wait_for_its_first_half_to_be_acknowledged():
    with served(Counted(0.0)) as address, connected(address) as connection:
        times = []
        for n in range(10):
            start = time.monotonic()
            post(connection, address, {"n": n})
            answer = HTTPResponse(connection)
            answer.begin()
            assert parts(answer.read())[0] == {"n": n}
            times.append(time.monotonic() - start)
    assert min(times[1:]) < 0.03  # a delayed acknowledgement comes after 0.04 s


def test_slow_clients_hold_up_nobody():
    counted = Counted(0.0)
    with served(counted) as address:
        slow = [connected(address) for _ in range(20)]
        for connection in slow[:10]:  # half a question
            connection.sendall(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le")
        for connection in slow[10:]:  # an answer that is never read
            post(connection, address, {"n": -1, "size": 10 << 20})
        start = time.monotonic()
        for n in range(20):
            assert parts(ask_at(address, "tile", {"n": n}))[0] == {"n": n}
        assert time.monotonic() - start < 5
        for connection in slow:
            connection.close()


def test_ten_tabs_at_once_all_get_their_answers(session):
    found = []
    with served(session) as address:
        params = {"layer": 0, "head": 0, "level": 0, "row": 0, "column": 0}
        threads = [
            threading.Thread(target=lambda: found.append(ask_at(address, "tile", params, 60))) for _ in range(10)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1
        assert len(found) == 10
        with pytest.raises(HTTPError, match="404"):
            ask_at(address, "nothing", {})


SERVE = """
import sys, torch, regard, time
from regard.viewer.run import Run, of_observation
from regard.viewer.server import Server
from regard.viewer.session import Session
seen = regard.observe(*torch.randn(2, 1, 1, 9, 4))
session = Session([Run("m", "s", of_observation(seen))])
def endless(job):
    while True:
        job.progress(0)
        time.sleep(0.01)
session.jobs.start("endless", endless)
server = Server(session)
print(server.address, flush=True)
server.run()
print("ended", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_an_interruption_ends_it_at_once_with_connections_open_and_jobs_running():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVE], **pipes) as process:
        try:
            address = process.stdout.readline().strip()
            assert parts(ask_at(address, "info", {}, 60))[0]["batch"] == 1
            with connected(address) as open_connection:
                open_connection.sendall(b"POST / HTTP/1.1\r\nHo")
                start = time.monotonic()
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert time.monotonic() - start < 5
    assert (process.returncode, out, err) == (0, "ended\n", "")


def test_modules_are_joined_in_scopes_of_their_own():
    modules = {
        "a.js": "import { b, C } from './b.js';\nimport { d } from './d.js';\nconst same = 1;\nexport function a() {}",
        "b.js": "import { d } from './d.js';\nconst same = 2;\nexport const b = d;\nexport class C {}\n",
        "d.js": "export async function d() { const m = await import('x'); }",
    }
    code = joined(modules, "a.js", exports=True)
    assert code.index("module_d =") < code.index("module_b =") < code.index("module_a =")
    assert code.endswith("return { a };\n})();\nexport default module_a;\n")
    assert "const { b, C } = module_b;" in code
    assert code.count("const same") == 2
    for wrong, message in (
        ({"a.js": "import { a } from './a.js';"}, "imports itself"),
        ({"a.js": "import { b } from './b.js';"}, "imports b.js, which is not there"),
        ({"a.js": "import { x } from './b.js';", "b.js": "export const y = 1;"}, "b.js does not export x"),
        ({"a.js": "import x from './b.js';", "b.js": ""}, "write import"),
        ({"a.js": "export default 3;"}, "write import"),
        ({"a.js": "export let x = 3;"}, "write import"),
    ):
        with pytest.raises(ValueError, match=message):
            joined(wrong, "a.js")
