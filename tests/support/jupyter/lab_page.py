"""A JupyterLab server and a page of a real browser on one notebook, for tests and for the pictures in the docs."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import nbformat
from playwright.sync_api import Page
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from support.jupyter.chromium import chromium
from support.network.cut_wire import CutWire

WAIT_MS = 180_000  # limit of each wait for the page, in ms
# The Python of another environment, to try another version of JupyterLab; its kernels need hvdlab, too.
JUPYTER = os.environ.get("HVDLAB_TEST_JUPYTER") or sys.executable

EXTENSION = Path(__file__).parents[3] / "labextension" / "prebuilt"

KERNELSPEC = Path(__file__).parents[3] / "kernel_ext" / "kernel" / "kernelspec"

_SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none", "showHiddenCellsButton": False},
}


# Pages show a kernel's state as idle, too, before the kernel is connected.
_IDLE = """() => [...window.jupyterapp?.shell.widgets("main") ?? []].some(widget => {
    const kernel = widget.sessionContext?.session?.kernel;
    return kernel?.connectionStatus === "connected" && kernel.status === "idle";
})"""


class LabPage:
    """One notebook in JupyterLab. Cells are numbered from 0, among all cells."""

    def __init__(self, open_page: Callable[[], Page]) -> None:
        self._open = open_page
        self.page = open_page()

    def leave(self) -> None:
        """Close the page, as one closes a browser; the kernel goes on."""
        self.page.context.close()

    def come_back(self) -> None:
        """Open the notebook in a new browser window that knows nothing of the last one."""
        self.page = self._open()

    def explain(self, error: BaseException, picture: Path) -> None:
        """Add the page's visible state to a test's error."""
        self.page.screenshot(path=picture)
        error.add_note(f"The page is in {picture}.")
        for dialog in self.page.locator(".jp-Dialog").all_inner_texts():
            error.add_note(f"There is a dialog in front of the notebook: {dialog}")

    def wait_until_idle(self) -> None:
        """Wait until the kernel is connected and waits for cells: before that a cell that is run does nothing."""
        self.page.wait_for_function(_IDLE, timeout=WAIT_MS)

    def run(self, cell: int) -> None:
        """Begin to run a cell, as Ctrl-Enter in it does."""
        self.page.locator(".jp-Notebook-cell").nth(cell).locator(".cm-content").click(timeout=WAIT_MS)
        self.page.keyboard.press("Control+Enter")

    def prompt(self, cell: int) -> str:
        """``[*]:`` while it runs or waits, ``[3]:`` afterwards."""
        found = self.page.locator(".jp-Notebook-cell").nth(cell).locator(".jp-InputPrompt").text_content()
        return found or ""

    def output(self, cell: int) -> str:
        """Return the text under a cell, as one reads it."""
        return self.page.locator(".jp-Notebook-cell").nth(cell).locator(".jp-OutputArea").inner_text()

    def wait_for_text(self, cell: int, text: str, *, running: bool = False) -> None:
        """Wait until a text is under a cell; with ``running`` the cell must not have ended by then."""
        self.page.wait_for_function(
            """([cell, text, running]) => {
                const node = document.querySelectorAll(".jp-Notebook-cell")[cell];
                const shown = node.querySelector(".jp-OutputArea")?.innerText ?? "";
                const prompt = node.querySelector(".jp-InputPrompt").textContent;
                return shown.includes(text) && (!running || prompt.includes("*"));
            }""",
            arg=[cell, text, running],
            timeout=WAIT_MS,
        )

    def command(self, name: str, typed: str = "") -> None:
        """Choose a command in the palette, by its name or by typed text."""
        box = self.page.locator(".lm-CommandPalette-input")
        for _ in range(10):
            self.page.keyboard.press("Control+Shift+C")
            # It closes again when another element takes the focus, which happens on pages just loaded.
            with suppress(PlaywrightTimeoutError):
                box.fill(typed or name, timeout=4000)
                self.page.locator(".lm-CommandPalette-item", has_text=name).first.click(timeout=4000)
                return
        raise AssertionError(f"the palette does not stay open: {name}")

    def wait_until_ended(self, cell: int) -> None:
        self.page.wait_for_function(
            r"""(cell) => /\[\d+\]/.test(
                document.querySelectorAll(".jp-Notebook-cell")[cell].querySelector(".jp-InputPrompt").textContent)""",
            arg=cell,
            timeout=WAIT_MS,
        )

    def finish(self, cell: int) -> str:
        """Run a cell to its end; return its output."""
        self.run(cell)
        self.wait_until_ended(cell)
        return self.output(cell)

    def saved_outputs(self, path: Path, cell: int) -> list[Any]:
        """Return the outputs of a cell in a notebook's file; none while the server is writing it."""
        try:
            found: list[Any] = nbformat.read(path, 4).cells[cell].get("outputs", [])
        except nbformat.reader.NotJSONError:  # half written
            return []
        return found

    def stop(self) -> None:
        """The toolbar's button."""
        self.page.locator('[data-command="notebook:interrupt-kernel"]').first.click()


@contextmanager
def lab_page(
    directory: Path,
    notebook: nbformat.NotebookNode,
    *,
    width: int = 1100,
    height: int = 800,
    theme: str = "",
    scale: float = 1,
    many: bool = False,
    classic: bool = False,
    kernel: bool = True,
    wire: CutWire | None = None,
) -> Iterator[LabPage]:
    """Yield JupyterLab with its own settings in ``directory``, and a page on ``notebook`` whose kernel is idle.

    The notebook and the kernels' files are in ``directory / "work"``. The server is that of :func:`shared_server`,
    where there is one with these environment variables.

    With ``many`` the page can show other things beside the notebook. With ``classic`` it is Notebook 7. Without ``kernel``
    the call does not wait for one. With a ``wire`` the page talks to the server over that.
    """
    with ExitStack() as stack:
        server = next((one for one in _shared if one.environment == _environment()), None)
        if server is None:
            server = stack.enter_context(_server(directory / "server"))
        stack.callback(server.end_kernels)
        path = server.settle_in(directory, theme)
        nbformat.write(notebook, directory / "work" / path.name)
        address = server.address
        if wire is not None:
            address = stack.enter_context(wire.to(address))
        browser = stack.enter_context(chromium())

        def open_page() -> Page:
            page = browser.new_context(
                viewport={"width": width, "height": height}, device_scale_factor=scale
            ).new_page()
            page.set_default_timeout(WAIT_MS)  # of widgets that name none
            place = "notebooks" if classic else "lab/tree" if many else "doc/tree"
            page.goto(f"{address}/{place}/{path}?token={server.token}", timeout=WAIT_MS)
            page.wait_for_selector(".jp-Notebook-cell .cm-content", timeout=WAIT_MS)
            return page

        lab = LabPage(open_page)
        if kernel:
            lab.wait_until_idle()
        try:
            yield lab
        except (AssertionError, PlaywrightTimeoutError) as error:
            lab.explain(error, directory / "failed.png")
            raise


@dataclass
class _Server:
    """Server for one page after the other, each with a directory of its own."""

    root: Path
    address: str
    token: str
    environment: dict[str, str]
    pages: int = 0

    def settle_in(self, directory: Path, theme: str) -> Path:
        """Use settings and files of this directory from now on; returns where the notebook is for the server."""
        self.pages += 1
        (self.root / "work" / str(self.pages)).mkdir()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "work").symlink_to(self.root / "work" / str(self.pages))
        settings = dict(_SETTINGS)
        if theme:
            settings["apputils-extension/themes"] = {"theme": theme}
        for name, values in settings.items():
            file = directory / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        for kept in ("settings", "workspaces"):
            (directory / kept).mkdir(exist_ok=True)
            (self.root / kept).unlink(missing_ok=True)
            (self.root / kept).symlink_to(directory / kept)
        return Path(str(self.pages), "notebook.ipynb")

    def end_kernels(self) -> None:
        for kernel in json.loads(self._request("GET", "")):
            self._request("DELETE", f"/{kernel['id']}")

    def _request(self, method: str, path: str) -> bytes:
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.address}/api/kernels{path}", headers=headers, method=method)
        with urllib.request.urlopen(request) as answer:
            content: bytes = answer.read()
        return content


_shared: list[_Server] = []


@contextmanager
def shared_server(directory: Path) -> Iterator[None]:
    """Serve all pages of this block by one server: starting it takes longer than most of the tests with them."""
    with _server(directory) as server:
        _shared.append(server)
        try:
            yield
        finally:
            _shared.remove(server)


def _environment() -> dict[str, str]:
    """Return the environment of kernels of a server that is started now."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@contextmanager
def _server(root: Path) -> Iterator[_Server]:
    """Yield JupyterLab, which serves pages of Notebook 7 as well."""
    # Names of sockets are in it, which may have 107 characters.
    with TemporaryDirectory(prefix="jupyter-") as runtime:
        yield from _started(root, Path(runtime))


def _started(root: Path, runtime: Path) -> Iterator[_Server]:
    # The extension of this checkout, not the installed one.
    link = root / "share" / "labextensions" / "@hvdlab" / "labextension"
    link.parent.mkdir(parents=True)
    link.symlink_to(EXTENSION)
    (root / "work").mkdir()
    kernels = root / "share" / "kernels"
    kernels.mkdir()
    (kernels / "hvdlab").symlink_to(KERNELSPEC)
    # Each page would ask whether JupyterLab has to be built, for which the server starts node: a second of CPU.
    page_config = root / "config" / "labconfig" / "page_config.json"
    page_config.parent.mkdir(parents=True)
    page_config.write_text(json.dumps({"buildCheck": False}))
    environment = _environment()
    places = {
        # Importing torch takes longer than most tests: notebooks that need it declare so.
        "HVDLAB_PRELOAD": os.environ.get("HVDLAB_PRELOAD", "numpy"),
        "JUPYTER_PATH": root / "share",
        "JUPYTERLAB_SETTINGS_DIR": root / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": root / "workspaces",
        "JUPYTER_CONFIG_DIR": root / "config",
        "JUPYTER_RUNTIME_DIR": runtime,
        "IPYTHONDIR": root / "ipython",
    }
    # Ports are chosen before kernels bind them: with kernels of other tests beside them, some are taken by then.
    arguments = ["--KernelManager.transport=ipc"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    log = (root / "server.log").open("w")
    arguments += [
        "--no-browser",
        "--allow-root",
        "--LabApp.expose_app_in_browser=True",
        "--JupyterNotebookApp.expose_app_in_browser=True",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        f"--ServerApp.root_dir={root / 'work'}",
        f"--IdentityProvider.token={token}",
    ]
    server = subprocess.Popen(
        [JUPYTER, "-m", "jupyterlab", *arguments],
        env=environment | {name: str(place) for name, place in places.items()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root / "work",
    )
    try:
        assert server.stderr is not None
        for line in server.stderr:
            log.write(line)
            if re.search(rf":{port}/(lab|tree)\?token=", line):
                break
        else:
            raise RuntimeError(f"JupyterLab did not start: {(root / 'server.log').read_text()}")
        with _copied(server.stderr, log):
            try:
                yield _Server(root, f"http://127.0.0.1:{port}", token, environment)
            finally:
                server.send_signal(signal.SIGTERM)
    finally:
        server.terminate()
        server.wait(20)
        assert server.stderr is not None
        server.stderr.close()
        log.close()


@contextmanager
def _copied(stream: Iterable[str], log: IO[str]) -> Iterator[None]:
    """Read the pipe to its end, which the caller has to cause on leaving, so that its writer never waits for us."""
    thread = threading.Thread(target=lambda: log.writelines(stream))
    thread.start()
    try:
        yield
    finally:
        thread.join(30)
