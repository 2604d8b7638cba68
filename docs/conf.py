"""The site that ``make docs`` builds: pages in Markdown, tutorials as executed notebooks, and the reference from docstrings."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS / "_extensions"))

# The import of a framework only for its docstrings must not log, look for GPUs or start threads for them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# Before autodoc puts mocks into their place: these look at the versions of packages such as pyarrow, which a mock does not have.
for framework in ("pandas", "torch", "tensorflow", "keras"):
    importlib.import_module(framework)

project = "hvdlab"
author = "the authors of hvdlab"
project_copyright = author

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "launcher_table", "public_names"]
exclude_patterns = ["README.md", "images/*.py", "reference/horovod"]
root_doc = "index"

# Committed notebooks are executed by `make tutorial`; the site shows them as they are.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# Not in .venv: each has an environment of its own, or belongs to the user.
autodoc_mock_imports = ["cuda", "dask", "distributed", "fsspec", "mxnet", "py4j", "pyarrow", "pyspark", "ray"]
autodoc_member_order = "groupwise"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
highlight_language = "python"

suppress_warnings = [
    "misc.highlighting_failure",  # cells begin with %%, and outputs are no Python
    "ref.python",  # one class that several packages offer, such as ProcessSet
]

html_theme = "furo"
html_title = "hvdlab"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

#: Pages of the root, which the site shows as well.
_ROOT_PAGES = {"contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^()\s#]+)(#[^()\s]*)?\)")


def read_root_page(app: Sphinx, docname: str, content: list[str]) -> None:
    """Take the text of a page of the root, and let links lead to where the site has the file."""
    folder = (DOCS / docname).parent
    if docname in _ROOT_PAGES:
        folder, content[0] = ROOT, (ROOT / _ROOT_PAGES[docname]).read_text(encoding="utf-8")
    if app.env.doc2path(docname).suffix == ".md":
        content[0] = _LINK.sub(lambda match: _led(match, folder, DOCS / docname), content[0])


def _led(match: re.Match[str], folder: Path, page: Path) -> str:
    """Return a link as the site needs it: to a page, to a copy of a file, or the text alone for a folder or a file of Git's."""
    text, target, anchor = match[1], (folder / match[2]).resolve(), match[3] or ""
    root_pages = {(ROOT / name).resolve(): DOCS / f"{docname}.md" for docname, name in _ROOT_PAGES.items()}
    target = root_pages.get(target, target)
    if target.is_dir():
        return text
    path = os.path.relpath(target, page.parent)
    if target.is_relative_to(DOCS) and target.suffix in (".md", ".ipynb"):
        return f"[{text}]({path}{anchor})"
    return f"[{text}](path:{path})"


def copy_pictures(app: Sphinx, exception: Exception | None) -> None:
    """Copy the pictures for ``<picture>`` elements, whose files Sphinx does not see."""
    if exception is None and app.builder.format == "html":
        (Path(app.outdir) / "images").mkdir(exist_ok=True)
        for picture in (DOCS / "images").glob("*.png"):
            shutil.copyfile(picture, Path(app.outdir) / "images" / picture.name)


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_root_page)
    app.connect("build-finished", copy_pictures)
