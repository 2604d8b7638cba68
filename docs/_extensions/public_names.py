"""Warn of each public name that the reference lacks, so that ``make docs`` fails."""

from __future__ import annotations

import ast
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
SOURCE = Path(__file__).parents[2] / "src"
PACKAGES = (
    "hvdlab",
    "hvdlab.data",
    "hvdlab.keras",
    "hvdlab.kvstore",
    "hvdlab.mxnet",
    "hvdlab.numpy",
    "hvdlab.ray",
    "hvdlab.spark",
    "hvdlab.spark.keras",
    "hvdlab.spark.lightning",
    "hvdlab.spark.torch",
    "hvdlab.tensorflow",
    "hvdlab.torch",
    "hvdlab.torch.elastic",
)
#: No names of hvdlab's own: a version, and functions that only IPython calls.
OTHERS = {"__version__"}


def public_names(package: str) -> list[str]:
    """Return the ``__all__`` of a package, without importing it; submodules are left out, since they have entries of their own."""
    folder = SOURCE.joinpath(*package.split("."))
    for node in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "__all__"
        ):
            names = list(ast.literal_eval(node.value))
            break
    else:
        raise ValueError(f"{package} has no __all__")
    modules = {path.stem for path in folder.iterdir()}
    return [name for name in names if name not in modules and name not in OTHERS]


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name without an entry."""
    described = env.get_domain("py").objects
    for package in PACKAGES:
        for name in public_names(package):
            if f"{package}.{name}" not in described:
                LOGGER.warning("%s.%s is public, and the reference lacks it", package, name)


class SharedNamesDomain(PythonDomain):
    """Python's domain, in which several packages may offer one class, each under its own name."""

    def note_object(
        self, name: str, objtype: str, node_id: str, aliased: bool = False, location: object = None
    ) -> None:
        """Keep the first package's entry as that of the class's own module."""
        if not (aliased and name in self.objects):
            super().note_object(name, objtype, node_id, aliased, location)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_domain(SharedNamesDomain, override=True)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True}
