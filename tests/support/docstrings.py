"""Checks of the docstrings of all public names, as ``python tests/support/docstrings.py`` prints them; ``examples`` runs their examples.

The pages of ``docs/reference/api`` say which names are public. A docstring describes each parameter, the returned value, the
exceptions that the function itself raises, and, for a collective, whether its buffers are valid after a failure.
"""

from __future__ import annotations

import ast
import doctest
import enum
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference" / "api"

ELSEWHERE = ("cuda", "dask", "distributed", "fsspec", "mxnet", "py4j", "pyarrow", "pyspark", "ray")
"""Packages that the environment of tests lacks: they are replaced by mocks while their bindings are read."""

_DIRECTIVE = re.compile(r"^\.\. auto(module|class|function|exception):: +(\S+)", re.MULTILINE)
_SECTION = re.compile(
    r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note|Example YAML):[ \t]*$", re.MULTILINE
)
_ENTRY = re.compile(r"^    (\*{0,2}\w+(?:(?:, | / )\*{0,2}\w+)*)(?: \([^)]*\))?: ?(.*)", re.MULTILINE)
_AFTER_FAILURE = re.compile(
    r"after\s+a\s+failed|unchanged\s+then|may\s+have\s+been\s+overwritten", re.IGNORECASE
)
_STATED_DEFAULT = re.compile(r"``([^`]+)`` (?:\(default\)|by default)|[Dd]efault(?:s to|:) ``([^`]+)``")
_RETURNS = re.compile(r"(Return|Yield|Iterate|Make|Create|Build|Open|Start|Count|Whether|Convert|Read)\b")
_FOR_TENSORS = re.compile(r"shape|dtype|dimension|element", re.IGNORECASE)
_BUFFERS = {"tensor", "tensors", "obj", "params", "variables", "optimizer", "gradtape", "gradient"}
"""Parameters of a collective that hold what it reads or overwrites."""
_PROTOCOLS = ("hvdlab.launch.", "hvdlab.bindings.", "hvdlab.collectives.planes.")
"""Extension points: as for methods, a sentence that names a parameter by its own word describes it."""
_NEEDS_RANKS = ("context.engine(", "own_number(")
"""Calls that raise ``NotInitializedError`` before ``init()``."""


@dataclass(frozen=True)
class Docstring:
    """Docstring in Google's format, cut into its sections."""

    text: str

    @cached_property
    def sections(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for match in _SECTION.finditer(self.text):
            body = re.match(r"(?:\n(?:[ \t]+.*|[ \t]*(?=\n|\Z)))*", self.text[match.end() :])
            found[match[1]] = found.get(match[1], "") + (body[0] if body else "")
        return found

    def entries(self, section: str) -> dict[str, str]:
        """Return the text of each entry of a section by its name, without asterisks."""
        body = self.sections.get(section, "")
        starts = list(_ENTRY.finditer(body))
        ends = [match.start() for match in starts[1:]] + [len(body)] * bool(starts)
        return {
            name.strip("* "): " ".join(body[match.start(2) : end].split())
            for match, end in zip(starts, ends, strict=True)
            for name in re.split(r", | / ", match[1])
        }

    @property
    def prose(self) -> str:
        """The text in front of the first section."""
        return _SECTION.split(self.text, maxsplit=1)[0]

    def describes(self, parameter: str, *, by_word: bool = False) -> bool:
        """Return whether an entry or the prose says what a parameter is for; ``by_word``: also without quotes."""
        quoted = rf"``\*{{0,2}}{re.escape(parameter)}(=[^`]*)?``"
        word = rf"\b{re.escape(parameter.rstrip('_'))}\b"
        return (
            parameter in self.entries("Args")
            or parameter in self.entries("Attributes")
            or re.search(word if by_word else quoted, self.prose) is not None
        )


def modules() -> list[str]:
    """Return the names of the modules that the reference lists as a whole."""
    return [name for kind, name in _listed() if kind == "module"]


def _listed() -> list[tuple[str, str]]:
    return [
        (match[1], match[2])
        for page in sorted(PAGES.glob("*.md"))
        for match in _DIRECTIVE.finditer(page.read_text(encoding="utf-8"))
    ]


def public_objects() -> dict[str, Any]:
    """Return the public classes and functions by their names; those of several packages under the first."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for kind, name in _listed():
        if kind == "module":
            module = importlib.import_module(name)
            candidates = {f"{name}.{member}": getattr(module, member) for member in _members(module)}
        else:
            owner, _, member = name.rpartition(".")
            candidates = {name: getattr(importlib.import_module(owner), member)}
        for full, value in candidates.items():
            if (inspect.isclass(value) or callable(value)) and id(value) not in seen:
                seen.add(id(value))
                found[full] = value
    return found


def _members(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def callables(name: str, value: Any) -> Iterator[tuple[str, Any, type | None]]:
    """Yield a public function, or a class and its public methods, each with its name and its class."""
    yield name, value, None
    if not inspect.isclass(value):
        return
    for member in dir(value):
        if member.startswith("_"):
            continue
        raw = inspect.getattr_static(value, member)
        function = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
        if inspect.isfunction(function) and function.__module__.startswith("hvdlab."):
            yield f"{name}.{member}", raw, value


def problems() -> list[str]:
    """Return what the docstrings of all public names lack, one line each."""
    found: list[str] = []
    seen: set[int] = set()
    for name, value in public_objects().items():
        if not getattr(value, "__module__", "").startswith("hvdlab"):
            continue
        for full, member, owner in callables(name, value):
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if id(function) not in seen:
                seen.add(id(function))
                found += [f"{full}: {text}" for text in lacks(member, owner)]
    return found


def lacks(value: Any, owner: type | None = None) -> list[str]:
    """Return what the docstring of a class, a function or a method of ``owner`` lacks."""
    if isinstance(value, property):
        assert owner is not None
        return [] if _text(value.fget, owner) else ["has no docstring"]
    if inspect.isclass(value):
        return _class_lacks(value)
    function = getattr(value, "__func__", value)
    text = _text(function, owner)
    if not text:
        return ["has no docstring"]
    docstring, signature = Docstring(text), inspect.signature(function)
    by_word = owner is not None or function.__module__.startswith(_PROTOCOLS)
    overridden = _overridden(function, owner)
    everything = Docstring("\n\n".join([text, *map(inspect.cleandoc, overridden)]))
    bound = owner is not None and not isinstance(value, staticmethod)
    return [
        *(
            ()
            if overridden is _FOREIGN
            else _undescribed(everything, signature, skip_first=bound, by_word=by_word)
        ),
        *_surplus(docstring, signature),
        *_wrong_defaults(docstring, signature),
        *_unsaid_return(docstring, signature, function),
        *_unsaid_raises(docstring, function),
        *_unsaid_failure(docstring, signature, function),
    ]


def _text(function: Any, owner: type | None) -> str:
    if own := inspect.getdoc(function):
        return own
    for base in owner.__mro__[1:] if owner else ():
        if (inherited := vars(base).get(function.__name__)) and (text := inspect.getdoc(inherited)):
            return text
    return ""


_FOREIGN = ("",)
"""In place of docstrings: the method is one of a framework's, whose documentation describes its parameters."""


def _overridden(function: Any, owner: type | None) -> Sequence[str]:
    """Return the docstrings of the methods that a method overrides."""
    bases = [base for base in owner.__mro__[1:] if function.__name__ in vars(base)] if owner else []
    if any(not base.__module__.startswith("hvdlab.") for base in bases):
        return _FOREIGN
    return [text for base in bases if (text := vars(base)[function.__name__].__doc__)]


def _class_lacks(cls: type) -> list[str]:
    own = vars(cls).get("__doc__")
    if not own:
        return ["has no docstring"]
    made = cls.__init__  # type: ignore[misc]  # of this class
    if issubclass(cls, enum.Enum | BaseException) or getattr(cls, "_is_protocol", False):
        return []
    if not inspect.isfunction(made) or not made.__module__.startswith(("hvdlab.", cls.__module__)):
        return []
    texts = [inspect.cleandoc(own), inspect.getdoc(made) if "__init__" in vars(cls) else None]
    texts += [inspect.getdoc(base) for base in cls.__mro__[1:] if base is not object]
    docstring = Docstring("\n\n".join(text for text in texts if text))
    return [
        *_undescribed(
            docstring,
            inspect.signature(made),
            skip_first=True,
            by_word=cls.__module__.startswith(_PROTOCOLS),
        ),
        *_surplus(Docstring(inspect.cleandoc(own)), inspect.signature(made)),
        *(_unsaid_raises(docstring, made) if "__init__" in vars(cls) else ()),
    ]


def _undescribed(
    docstring: Docstring, signature: inspect.Signature, *, skip_first: bool, by_word: bool
) -> Iterator[str]:
    names = [name for name in signature.parameters if not name.startswith("_")]
    if skip_first and list(signature.parameters)[:1] == names[:1]:
        del names[:1]
    for name in names:
        if not docstring.describes(name, by_word=by_word):
            yield f"does not describe {name}"


def _surplus(docstring: Docstring, signature: inspect.Signature) -> Iterator[str]:
    variable = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in docstring.entries("Args"):
        if name not in signature.parameters and not variable:
            yield f"describes {name}, which is no parameter"


def _wrong_defaults(docstring: Docstring, signature: inspect.Signature) -> Iterator[str]:
    for name, text in docstring.entries("Args").items():
        parameter = signature.parameters.get(name)
        if parameter is None or parameter.default in (None, parameter.empty):
            continue
        for match in _STATED_DEFAULT.finditer(text):
            stated = match[1] or match[2]
            default = parameter.default
            names = (str(default), getattr(default, "name", ""), getattr(default, "__name__", ""))
            if stated.strip("'\"").removeprefix("hvd.").lower() not in {str(each).lower() for each in names}:
                yield f"says that {name} is {stated} by default, and it is {default!r}"


def _unsaid_return(docstring: Docstring, signature: inspect.Signature, function: Any) -> Iterator[str]:
    annotation = str(signature.return_annotation).strip("'\"")
    if annotation in ("None", "NoReturn", "Never", "<class 'NoneType'>"):
        return
    if signature.return_annotation is signature.empty and not _returns_value(function):
        return
    if "Returns" in docstring.sections or "Yields" in docstring.sections or _RETURNS.match(docstring.text):
        return
    if re.search(r"\b[Rr]eturns?\b|\b[Yy]ields?\b", docstring.text):
        return
    yield f"does not say what it returns ({annotation})"


def _unsaid_raises(docstring: Docstring, function: Any) -> Iterator[str]:
    said = docstring.entries("Raises")
    body = _body(function)
    joins = body is not None and any(call in ast.unparse(body) for call in _NEEDS_RANKS)
    if joins and "NotInitializedError" not in docstring.text:
        yield "raises NotInitializedError, and does not say so"
    for name in sorted(_raised(function)):
        error = inspect.unwrap(function).__globals__.get(name) or getattr(__import__("builtins"), name, None)
        names = {base.__name__ for base in error.__mro__} if inspect.isclass(error) else {name}
        if not names - {"object", "BaseException"} & set(said) and not any(
            f"``{each}``" in docstring.text for each in names
        ):
            yield f"raises {name}, and does not say when"


def _raised(function: Any) -> set[str]:
    """Return the classes that the body of a function raises itself."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(raised, ast.Name) and raised.id[:1].isupper():
                found.add(raised.id)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                visit(child)

    body = _body(function)
    for statement in body.body if body else ():
        visit(statement)
    return found - {"NotImplementedError", "AssertionError", "StopIteration"}


def _returns_value(function: Any) -> bool:
    body = _body(function)
    return body is not None and any(isinstance(n, ast.Return) and n.value is not None for n in ast.walk(body))


def _body(function: Any) -> ast.FunctionDef | None:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        node = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):  # made at run time
        return None
    return node if isinstance(node, ast.FunctionDef) else None


def _unsaid_failure(docstring: Docstring, signature: inspect.Signature, function: Any) -> Iterator[str]:
    """Yield what a collective's contract lacks: a collective is a function with a ``process_set``."""
    if not {"process_set", "root_rank"} & set(signature.parameters):
        return
    raised = docstring.entries("Raises")
    if "InvalidRequestError" not in raised:
        yield "does not say when it raises InvalidRequestError"
    if not function.__name__.rstrip("_").endswith("_async") and "AbortedError" not in docstring.text:
        yield "does not say when it raises AbortedError"
    if _BUFFERS & set(signature.parameters) and not _AFTER_FAILURE.search(docstring.text):
        yield "does not say whether its buffers are valid after a failure"
    for name in ("tensor", "tensors"):
        if name in signature.parameters and not _FOR_TENSORS.search(docstring.entries("Args").get(name, "")):
            yield f"gives no shape or dtype of {name}"


def run_examples(names: Sequence[str]) -> dict[str, str]:
    """Run the examples of modules, and of their public classes and functions, as doctests in this process.

    Returns:
        For each module the report of what failed; empty if nothing did, or a sentence if it has no example.
    """
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    reports = {}
    for name in names:
        module = importlib.import_module(name)
        texts: dict[str, tuple[str, dict[str, object]]] = {name: (module.__doc__ or "", {})}
        for member in _members(module):
            value = getattr(module, member)
            if getattr(value, "__module__", "").startswith("hvdlab"):
                for full, each, _ in callables(f"{name}.{member}", value):
                    function = each.fget if isinstance(each, property) else getattr(each, "__func__", each)
                    texts[full] = (
                        getattr(function, "__doc__", None) or "",
                        vars(sys.modules[value.__module__]),
                    )
        report = io.StringIO()
        for full, (text, variables) in texts.items():
            example = doctest.DocTestParser().get_doctest(text, dict(variables), full, None, None)
            runner.run(example, out=report.write)
        has_one = ">>>" in texts[name][0]
        reports[name] = report.getvalue() if has_one else f"{name} has no example in its docstring"
    return reports


def main() -> None:
    if sys.argv[1:2] == ["examples"]:
        # Ray would write a token into the user's home, and Spark would start the first Python of the path.
        os.environ.update(
            RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", PYSPARK_PYTHON=sys.executable
        )
        json.dump(run_examples(sys.argv[2:] or modules()), sys.stdout)
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    for framework in (
        "pandas",
        "torch",
        "tensorflow",
        "keras",
    ):  # before mocks are in place: they look at versions
        importlib.import_module(framework)
    from sphinx.ext.autodoc import mock

    absent = [name for name in ELSEWHERE if importlib.util.find_spec(name) is None]
    with mock(absent):
        for problem in problems():
            print(problem)


if __name__ == "__main__":
    main()
