"""A JupyterLab server and a page of a real browser on one notebook, for tests and for the pictures in the docs."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import nbformat
from playwright.sync_api import Page, sync_playwright

from cut_wire import CutWire

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 60_000
# The Python of another environment, to try another version of JupyterLab; its kernels need hvdlab, too.
JUPYTER = os.environ.get("HVDLAB_TEST_JUPYTER") or sys.executable

EXTENSION = Path(__file__).parents[1] / "labextension" / "prebuilt"

KERNELSPEC = Path(__file__).parents[1] / "kernel_ext" / "spmd" / "kernelspec"

_SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none", "showHiddenCellsButton": False},
}


class LabPage:
    """One notebook in JupyterLab. Cells are numbered from 0, among all cells."""

    def __init__(self, open_page: Callable[[], Page], *, classic: bool = False) -> None:
        self._open, self._classic = open_page, classic
        self.page = open_page()

    def leave(self) -> None:
        """Close the page, as one closes a browser; the kernel goes on."""
        self.page.context.close()

    def come_back(self) -> None:
        """Open the notebook in a new browser window that knows nothing of the last one."""
        self.page = self._open()

    def wait_until_idle(self) -> None:
        """Wait until the kernel is connected and waits for cells."""
        if self._classic:
            # What it says of a kernel that is not idle fades away once it is.
            self.page.wait_for_selector(".jp-NotebookKernelStatus-fade", state="attached", timeout=WAIT_MS)
            return
        # The notebook's own indicator also says idle before the kernel is connected; the status bar does not.
        self.page.wait_for_selector("text=/\\| Idle/", timeout=WAIT_MS)

    def run(self, cell: int) -> None:
        """Begin to run a cell, as Ctrl-Enter in it does."""
        self.page.locator(".jp-Notebook-cell").nth(cell).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")

    def prompt(self, cell: int) -> str:
        """``[*]:`` while it runs or waits, ``[3]:`` afterwards."""
        found = self.page.locator(".jp-Notebook-cell").nth(cell).locator(".jp-InputPrompt").text_content()
        return found or ""

    def output(self, cell: int) -> str:
        """The text under a cell, as one reads it."""
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

    def wait_until_ended(self, cell: int) -> None:
        self.page.wait_for_function(
            r"""(cell) => /\[\d+\]/.test(
                document.querySelectorAll(".jp-Notebook-cell")[cell].querySelector(".jp-InputPrompt").textContent)""",
            arg=cell,
            timeout=WAIT_MS,
        )

    def finish(self, cell: int) -> str:
        """Run a cell to its end; returns what is under it."""
        self.run(cell)
        self.wait_until_ended(cell)
        return self.output(cell)

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
    """JupyterLab with its own settings in ``directory``, and a page on ``notebook`` whose kernel is idle.

    With ``many`` the page can show other things beside the notebook. With ``classic`` it is Notebook 7. Without ``kernel``
    nobody waits for one. With a ``wire`` the page talks to the server over that.
    """
    work = directory / "work"
    work.mkdir(parents=True)
    path = work / "notebook.ipynb"
    nbformat.write(notebook, path)
    with ExitStack() as stack:
        address, token = stack.enter_context(_server(directory, work, theme, classic))
        if wire is not None:
            address = stack.enter_context(wire.to(address))
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        stack.callback(browser.close)

        def open_page() -> Page:
            page = browser.new_context(
                viewport={"width": width, "height": height}, device_scale_factor=scale
            ).new_page()
            place = "notebooks" if classic else "lab/tree" if many else "doc/tree"
            page.goto(f"{address}/{place}/{path.name}?token={token}", timeout=WAIT_MS)
            page.wait_for_selector(".jp-Notebook-cell .cm-content", timeout=WAIT_MS)
            return page

        lab = LabPage(open_page, classic=classic)
        if kernel:
            lab.wait_until_idle()
        yield lab


@contextmanager
def _server(directory: Path, work: Path, theme: str, classic: bool) -> Iterator[tuple[str, str]]:
    settings = dict(_SETTINGS)
    if theme:
        settings["apputils-extension/themes"] = {"theme": theme}
    for name, values in settings.items():
        file = directory / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    # The extension of this checkout, whatever is installed.
    link = directory / "share" / "labextensions" / "@hvdlab" / "labextension"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(EXTENSION)
    kernels = directory / "share" / "kernels"
    kernels.mkdir()
    (kernels / "hvdlab").symlink_to(KERNELSPEC)
    environment = os.environ | {
        "JUPYTER_PATH": str(directory / "share"),
        "JUPYTERLAB_SETTINGS_DIR": str(directory / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(directory / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(directory / "config"),
        "JUPYTER_RUNTIME_DIR": str(directory / "runtime"),
        "IPYTHONDIR": str(directory / "ipython"),
    }
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    log = (directory / "server.log").open("w")
    arguments: Sequence[str] = [
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        f"--ServerApp.root_dir={work}",
        f"--IdentityProvider.token={token}",
    ]
    server = subprocess.Popen(
        [JUPYTER, "-m", "notebook" if classic else "jupyterlab", *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=work,
    )
    try:
        assert server.stderr is not None
        for line in server.stderr:
            log.write(line)
            if re.search(rf":{port}/(lab|tree)\?token=", line):
                break
        else:
            raise RuntimeError(f"JupyterLab did not start: {(directory / 'server.log').read_text()}")
        with _drained(server.stderr):
            try:
                yield f"http://127.0.0.1:{port}", token
                _end_kernels(f"http://127.0.0.1:{port}", token)
            finally:
                server.send_signal(signal.SIGTERM)
    finally:
        server.terminate()
        server.wait(20)
        assert server.stderr is not None
        server.stderr.close()
        log.close()


@contextmanager
def _drained(stream: Iterable[str]) -> Iterator[None]:
    """Read the pipe to its end, which whoever leaves this has to cause, so that its writer never waits for us."""
    thread = threading.Thread(target=lambda: [None for _ in stream])
    thread.start()
    try:
        yield
    finally:
        thread.join(30)


def _end_kernels(address: str, token: str) -> None:
    headers = {"Authorization": f"token {token}"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}/api/kernels", headers=headers)) as answer:
        kernels = json.load(answer)
    for kernel in kernels:
        request = urllib.request.Request(
            f"{address}/api/kernels/{kernel['id']}", headers=headers, method="DELETE"
        )
        urllib.request.urlopen(request).close()
