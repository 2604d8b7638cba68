"""Measures of the product's text: modules, names, imports and prose, as `make house` prints them.

The product is the contents of a wheel: the rooms of the first level and `src/hvdlab`, as the one package `hvdlab`.
Imports inside functions and below `TYPE_CHECKING` count as imports: a reader has to follow them all the same.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("collectives", "kernel_ext", "magics", "widgets")
PACKAGE = "hvdlab"
SMALL = 120
"""Lines below which a module needs a second importer, or one from another folder, to be worth a file."""

CALLABLE = "Callable["

CLAUSES = re.compile(r"\bwhat(ever)?\b", re.IGNORECASE)
"""Noun clauses that a reader has to decode."""
ACTORS = re.compile(
    r"\b(who|whom|whoever|nobody|somebody|told|tells|tell|said|says|say|wants|wanted|anew|else)\b",
    re.IGNORECASE,
)
"""Words in place of an actor that has a name."""


@dataclass
class Module:
    """Module of the product.

    Attributes:
        name: Its dotted name below `hvdlab`; empty for the package itself.
        folder: The directory that it lies in.
        text, tree: Its source, and the same parsed.
        is_package: Whether it is an `__init__.py`.
    """

    name: str
    folder: Path
    text: str
    is_package: bool

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def comment_lines(self) -> int:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})

    @property
    def public_classes(self) -> list[str]:
        classes = [node.name for node in self.tree.body if isinstance(node, ast.ClassDef)]
        return [name for name in classes if not name.startswith("_")]

    @property
    def docstrings(self) -> Iterator[str]:
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(self.tree):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield text

    @property
    def callable_types(self) -> set[str]:
        """Return the module's own names for types of callables."""
        return {
            target.id
            for node in self.tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp)
            if CALLABLE in ast.unparse(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    @property
    def constructor_parameters(self) -> Iterator[tuple[str, ast.expr]]:
        """Yield the parameters of constructors, as ``Class.parameter``, with their annotations."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    arguments = item.args
                    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                        if one.annotation is not None:
                            yield f"{node.name}.{one.arg}", one.annotation


@dataclass
class House:
    """All modules of the product, and their imports of each other.

    Attributes:
        modules: Modules by dotted name.
    """

    modules: dict[str, Module] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path = ROOT) -> House:
        """Read the product below the root of a checkout."""
        house = cls()
        for room in ROOMS:
            for path in sorted((root / room).rglob("*.py")):
                house._add(path, root)
        inner = root / "src" / PACKAGE
        for path in sorted(inner.rglob("*.py")):
            # Rooms are reached by links as well: each file is read once.
            if not any(parent.is_symlink() for parent in path.parents):
                house._add(path, inner)
        return house

    def _add(self, path: Path, base: Path) -> None:
        parts = list(path.relative_to(base).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        if is_package:
            parts.pop()
        name = ".".join(parts)
        self.modules[name] = Module(name, path.parent, path.read_text(encoding="utf-8"), is_package)

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Return the modules that each module imports, wherever in the file the import stands."""
        return {name: set(self._imported(module)) - {name} for name, module in self.modules.items()}

    def _imported(self, module: Module) -> Iterator[str]:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if (name := _below(alias.name)) in self.modules:
                        yield str(name)
            elif isinstance(node, ast.ImportFrom) and (base := _below(node.module or "")) is not None:
                for alias in node.names:
                    deep = f"{base}.{alias.name}" if base else alias.name
                    if deep in self.modules:
                        yield deep
                    elif base in self.modules:
                        yield base

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for name, imported in self.imports.items():
            for other in imported:
                found[other].add(name)
        return found

    def single_importers(self) -> dict[str, str]:
        """Return small modules that only a neighbour in the same folder imports, with that neighbour."""
        found: dict[str, str] = {}
        for name, module in self.modules.items():
            importers = self.importers[name]
            if module.is_package or module.lines >= SMALL or len(importers) != 1:
                continue
            (importer,) = importers
            if self.modules[importer].folder == module.folder:
                found[name] = importer
        return found

    def ambiguous_classes(self) -> dict[str, list[str]]:
        """Return the names of public classes that stand for more than one class, with the modules that define them."""
        places: dict[str, list[str]] = defaultdict(list)
        for name, module in self.modules.items():
            for public in module.public_classes:
                places[public].append(name)
        return {name: modules for name, modules in places.items() if len(set(modules)) > 1}

    def bare_callables(self) -> list[str]:
        """Return the constructors' parameters that are bare callables, by their types or by a name that a module of the product gives such."""
        types = {name: module.callable_types for name, module in self.modules.items()}
        found = []
        for name, module in self.modules.items():
            known = types[name] | {
                alias.asname or alias.name
                for node in ast.walk(module.tree)
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
                if alias.name in types.get(_below(node.module or "") or "", ())
            }
            for parameter, annotation in module.constructor_parameters:
                names = {part.id for part in ast.walk(annotation) if isinstance(part, ast.Name)}
                if CALLABLE in ast.unparse(annotation) or names & known:
                    found.append(f"{name}.{parameter}")
        return found

    def circles(self) -> list[list[str]]:
        """Return groups of modules that import each other in a circle: strongly connected components, by Tarjan's algorithm."""
        order: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        found: list[list[str]] = []

        def visit(name: str) -> None:
            order[name] = low[name] = len(order)
            stack.append(name)
            for other in self.imports[name]:
                if other not in order:
                    visit(other)
                    low[name] = min(low[name], low[other])
                elif other in stack:
                    low[name] = min(low[name], order[other])
            if low[name] == order[name]:
                at = stack.index(name)
                members, stack[at:] = stack[at:], []
                if len(members) > 1:
                    found.append(sorted(members))

        for name in self.modules:
            if name not in order:
                visit(name)
        return sorted(found, key=len, reverse=True)

    def figures(self) -> dict[str, float]:
        """Return the figures by which the tree's text is judged, by name."""
        docstrings = [text for module in self.modules.values() for text in module.docstrings]
        thousand_words = sum(len(re.findall(r"[A-Za-z']+", text)) for text in docstrings) / 1000
        lines = sum(module.lines for module in self.modules.values())
        comments = sum(module.comment_lines for module in self.modules.values())
        circles = self.circles()
        return {
            "modules": len(self.modules),
            "lines": lines,
            f"modules under {SMALL} lines that only a neighbour imports": len(self.single_importers()),
            "class names with several meanings": len(self.ambiguous_classes()),
            "import circles": len(circles),
            "modules in import circles": sum(map(len, circles)),
            "callables among constructors' parameters": len(self.bare_callables()),
            "comment lines, percent": round(100 * comments / lines, 1),
            "clauses with `what` per 1,000 words of docstrings": round(
                sum(len(CLAUSES.findall(text)) for text in docstrings) / thousand_words, 1
            ),
            "unnamed actors per 1,000 words of docstrings": round(
                sum(len(ACTORS.findall(text)) for text in docstrings) / thousand_words, 1
            ),
        }


def _below(name: str) -> str | None:
    """Return a dotted name without the package's own; None for a module of another package."""
    if name == PACKAGE:
        return ""
    return name.removeprefix(f"{PACKAGE}.") if name.startswith(f"{PACKAGE}.") else None


if __name__ == "__main__":
    for figure, value in House.read().figures().items():
        print(f"{value:>10,}  {figure}")
