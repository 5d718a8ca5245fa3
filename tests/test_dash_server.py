"""The real waitress server over HTTP: what is answered, what is refused, ports, the SSH line; the offline report; the notebook."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ampscope_dashboards.app import create_app
from ampscope_dashboards.notebook import show
from ampscope_dashboards.server import Server, allowed_hosts, is_loopback, ssh_line

import ampscope
from ampscope.cli.main import main
from ampscope.record.step import Layer
from tests.helpers_log import records, write_run

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Return a folder with one run whose layer names are hostile."""
    folder = tmp_path_factory.mktemp("logs")
    layers = [Layer(n, (32, 32), 1024, "float32", "Adam.0") for n in (HOSTILE, "a.weight", "b.weight")]
    write_run(folder, layers, records(60, layers))
    return folder


@pytest.fixture(scope="module")
def server(logs):
    """Serve them."""
    made = Server(create_app(logs), port=0)
    made.start()
    yield made
    made.close()


def ask(server, path="/", method="GET", body=None, **headers):
    """Return (status, body text, headers) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(method, path, body=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode(errors="replace")
    connection.close()
    return answer.status, text, dict(answer.getheaders())


def test_the_page_is_served_with_a_policy_that_keeps_requests_here(server):
    """200, CSP, nosniff; nothing in the page names another host."""
    status, text, headers = ask(server)
    assert status == 200
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example"])
def test_foreign_hosts_are_refused(server, host):
    """DNS rebinding gets nothing."""
    status, text, _ = ask(server, Host=host)
    assert status == 403
    assert "script" not in text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1234", "[::1]:8060"])
def test_its_own_names_are_answered(server, host):
    """Whatever the port (an SSH tunnel changes it)."""
    assert ask(server, Host=host)[0] == 200


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}, {"Origin": "null"}]
)
def test_cross_origin_callbacks_are_refused(server, headers):
    """A foreign page cannot make this browser run a callback."""
    status, _, _ = ask(
        server, "/_dash-update-component", "POST", json.dumps({}), Content_Type="application/json", **headers
    )
    assert status == 403


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/assets/../app.py",
        "/assets/%2e%2e/app.py",
        "/..%2f..%2fetc/passwd",
        "/run/ampscope-0-rank0.arrows",
    ],
)
def test_no_file_outside_the_assets_is_served(server, path):
    """Neither the system's, nor the package's, nor the log's."""
    _, text, _ = ask(server, path)
    assert "root:" not in text
    assert "create_app" not in text
    assert "ARROW" not in text


def test_the_health_endpoint_answers(server):
    """Scripts can wait for it."""
    assert ask(server, "/health")[0] == 200


def test_a_prefix_is_honoured(logs):
    """Behind a reverse proxy the page lives under a path."""
    made = Server(create_app(logs, url_prefix="/amp/"), port=0)
    made.start()
    try:
        assert made.url.endswith("/amp/")
        status, text, _ = ask(made, "/amp/")
        assert status == 200
        assert "/amp/_dash-component-suites" in text
        assert ask(made, "/")[0] == 404
    finally:
        made.close()


def test_the_next_free_port_is_taken(logs):
    """When the one asked for is in use."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        made = Server(create_app(logs), port=port)
        made.close()
        assert made.port > port


def test_a_host_that_cannot_be_bound_is_one_line(logs, capsys):
    """Exit status 2."""
    assert main(["dashboard", str(logs), "--host", "203.0.113.1", "--no-browser"]) == 2
    assert "cannot serve on" in capsys.readouterr().err
    assert main(["dashboard", str(logs), "--url-prefix", "amp"]) == 2
    assert main(["dashboard", str(Path(__file__))]) == 2


def test_which_names_are_allowed():
    """Loopback answers to loopback names alone; an exposed server to its own, and to those given."""
    assert set(allowed_hosts("127.0.0.1")) == {"127.0.0.1", "localhost", "::1"}
    assert "amp.example" in allowed_hosts("127.0.0.1", ["amp.example"])
    assert socket.gethostname() in allowed_hosts("0.0.0.0")
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example")


def test_the_ssh_line():
    """In an SSH session: how to reach the page from one's own machine."""
    assert ssh_line(8060, {}) == ""
    assert (
        ssh_line(8061, {"SSH_CONNECTION": "10.0.0.2 5000 10.0.0.1 22", "USER": "ada"})
        == "ssh -N -L 8061:127.0.0.1:8061 ada@10.0.0.1"
    )


def test_ctrl_c_ends_the_command_cleanly(logs):
    """SIGINT: status 0, no traceback, the address was printed, torch was never imported."""
    # A suite that runs in the background of a shell hands on that SIGINT is ignored.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from ampscope.cli.main import main; s = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(s)"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, "dashboard", str(logs), "--port", "0", "--no-browser"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={k: v for k, v in os.environ.items() if k != "SSH_CONNECTION"},
    )  # fmt: skip
    line = process.stdout.readline()
    assert line.startswith("http://127.0.0.1:")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(line.rsplit(":", 1)[1].strip("/\n")))) == 0:
                break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in err
    assert "Stopped." in err


def test_show_serves_and_stops(logs):
    """Outside Jupyter: an address, and a way to end it."""
    shown = show(logs, port=0)
    try:
        assert shown.url in repr(shown)
        assert ask(shown._server)[0] == 200
    finally:
        shown.stop()


def test_the_report_is_one_file_that_needs_nothing(logs, tmp_path, capsys):
    """Under 8 MB, plotly inside, hostile names inert, no address of another host asked for, refuses to overwrite."""
    out = tmp_path / "r.html"
    assert main(["report", str(logs), "-o", str(out)]) == 0
    text = out.read_text()
    assert 4e6 < len(text.encode()) < 8e6
    assert HOSTILE not in text
    body = text[text.index("<body>") :]
    assert "src=" not in body
    assert "https://" not in body
    assert '"showSendToCloud": false' in body
    assert "default-src 'none'" in text
    assert main(["report", str(logs), "-o", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["report", str(logs), "-o", str(out), "--force"]) == 0
    assert main(["report", str(logs), "-o", str(tmp_path / "missing" / "r.html")]) == 2


def test_a_run_without_a_step_is_reported_so(tmp_path):
    """No crash, no chart."""
    import torch

    scaler = torch.amp.GradScaler("cpu")
    ampscope.watch(scaler, torch.nn.Linear(2, 1), log_dir=tmp_path, run="r")
    ampscope.unwatch(scaler)
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 0
    assert "No step is recorded yet" in (tmp_path / "r.html").read_text()
