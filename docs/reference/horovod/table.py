"""Compares hvdlab with Horovod's public names, and writes ``docs/reference/horovod.md``.

::

    python docs/reference/horovod/table.py            # write the table
    python docs/reference/horovod/table.py --check    # fail if it is not what would be written

``api.toml`` has Horovod's names. ``verdicts.toml`` says how what differs differs and why what is absent is absent; what
can be seen by looking at the code is not said there, and what is said there is compared with the code.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
import tomllib
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from generated_page import Stale, write_or_check

HERE = Path(__file__).parent
PAGE = HERE.with_name("horovod.md")
VERDICTS = ("same", "extended", "different", "absent")
LATER = "later"


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    verdict: str
    note: str = ""


# -- what the code says -----------------------------------------------------------------------------------------------

SAME, EXTENDED, DIFFERENT, ABSENT = VERDICTS


@dataclass(frozen=True)
class Seen:
    """What a look at the code says of a name: a verdict, and the difference that was found."""

    verdict: str
    difference: str = ""


def look(module: str, name: str, described: str) -> Seen:
    """Compare ``module.name`` with its description in ``api.toml``; ``f().x`` is ``x`` of all that ``f`` may return."""
    function, made, member = name.partition("().")
    try:
        if described == "module":
            found: Any = importlib.import_module(f"{module}.{name}")
            return Seen(SAME if inspect.ismodule(found) else DIFFERENT, "it is no module")
        if made:
            kinds = _returned(getattr(importlib.import_module(module), function))
            seen = [_look_at_member(module, kind, member, described) for kind in kinds]
            return max(seen, key=lambda one: VERDICTS.index(one.verdict))
        owner_name, _, last = name.rpartition(".")
        owner = importlib.import_module(module)
        return _look_at_member(module, getattr(owner, owner_name) if owner_name else owner, last, described)
    except (ImportError, AttributeError):
        return Seen(ABSENT)


def _returned(function: Any) -> list[type]:
    """The classes that a function's annotation says it returns."""
    hint = typing.get_type_hints(function)["return"]
    return list(typing.get_args(hint)) or [hint]


def _look_at_member(module: str, owner: Any, name: str, described: str) -> Seen:
    if described == "attribute":
        return look_at_attribute(owner, name)
    is_member = not inspect.ismodule(owner)
    found: Any = inspect.getattr_static(owner, name) if is_member else getattr(owner, name)
    if described == "property":
        return Seen(SAME if isinstance(found, property) else DIFFERENT, "it is no property")
    if described.startswith("= "):
        return _look_at_value(found, described.removeprefix("= "))
    if described.startswith("class("):
        return _look_at_class(found, described)
    is_static = isinstance(found, staticmethod | classmethod)
    function = found.__func__ if isinstance(found, staticmethod) else found
    if described.startswith("static ") and not is_static:
        return Seen(DIFFERENT, "it is no static method")
    if not callable(function):
        return Seen(DIFFERENT, "it can't be called")
    bound = is_member and not is_static
    return compare_parameters(
        _reference(described.removeprefix("static ")), _own(function, bound), vars_of(module)
    )


def look_at_attribute(owner: Any, name: str) -> Seen:
    """Whether instances of a class have an attribute, which may be a property; of anything else, whether it has it."""
    if not inspect.isclass(owner):
        found: Any = getattr(owner, name)
    else:
        found = next((vars(cls)[name] for cls in owner.__mro__ if name in vars(cls)), None)
        if found is None and not any(name in _assigned(cls) for cls in owner.__mro__):
            return Seen(ABSENT)
    if isinstance(found, FunctionType | staticmethod | classmethod):
        return Seen(DIFFERENT, "it is a method")
    return Seen(SAME)


@cache
def _assigned(cls: type) -> frozenset[str]:
    """Attributes that a class declares, or assigns to its instances."""
    names = set(vars(cls).get("__annotations__", ()))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # one that is not written in Python
        return frozenset(names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            first = node.args[0]  # of torch's modules
            if node.func.attr in ("register_buffer", "register_parameter") and isinstance(
                first, ast.Constant
            ):
                names.add(str(first.value))
    return frozenset(names)


def _look_at_value(found: Any, described: str) -> Seen:
    try:
        wanted = ast.literal_eval(described)
    except (ValueError, SyntaxError):
        return Seen(SAME)
    return Seen(SAME) if found == wanted else Seen(DIFFERENT, f"its value is {found!r}")


def _look_at_class(found: Any, described: str) -> Seen:
    if not inspect.isclass(found):
        return Seen(DIFFERENT, "it is no class")
    base, _, signature = described.removeprefix("class(").partition(")")
    base = base.rpartition(".")[2]
    if base not in ("", *(cls.__name__ for cls in found.__mro__)):
        return Seen(DIFFERENT, f"it is no {base}")
    if not signature:
        return Seen(SAME)
    return compare_parameters(_reference(signature.strip()), _own(found, False), vars_of(found.__module__))


def vars_of(module: str) -> dict[str, Any]:
    """What defaults in signatures refer to."""
    import hvdlab.torch

    return {**vars(hvdlab.torch), **vars(importlib.import_module(module))}


@dataclass(frozen=True)
class Parameter:
    """A parameter; ``default`` is source text or a value."""

    name: str
    kind: Any
    default: Any = inspect.Parameter.empty


def _reference(signature: str) -> list[Parameter]:
    """The parameters of a signature given as text."""
    function = ast.parse(f"def f{signature}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    names = [argument.arg for argument in arguments.args]
    defaults: list[Any] = [inspect.Parameter.empty] * (len(names) - len(arguments.defaults))
    defaults += [ast.unparse(default) for default in arguments.defaults]
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    found = [Parameter(name, plain, default) for name, default in zip(names, defaults, strict=True)]
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return found


def _own(function: Any, bound: bool) -> list[Parameter]:
    parameters = list(inspect.signature(function).parameters.values())[bound:]
    return [Parameter(p.name, p.kind, p.default) for p in parameters]


def compare_parameters(wanted: list[Parameter], own: list[Parameter], scope: Mapping[str, Any]) -> Seen:
    """Whether every call that fits ``wanted`` means the same to ``own``."""
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    takes_all = {p.kind for p in wanted} >= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    if (
        takes_all and len(wanted) == 2
    ):  # Horovod hands on what it gets, here to something that is listed elsewhere
        return Seen(SAME)
    names, ours = [p.name for p in wanted if p.kind is plain], [p.name for p in own if p.kind is plain]
    if ours[: len(names)] != names:
        return Seen(DIFFERENT, f"its parameters are {', '.join(ours) or 'none'}")
    extra = []
    for theirs, mine in zip(wanted, own, strict=False):
        if theirs.kind is not plain or mine.kind is not plain:
            break
        if theirs.default is inspect.Parameter.empty:
            if mine.default is not inspect.Parameter.empty:
                extra.append(f"`{mine.name}` may be left out")
        elif not _equal_default(theirs.default, mine.default, scope):
            return Seen(DIFFERENT, f"`{mine.name}` is {_shown(mine.default)} if it is left out")
    own_kinds = {p.kind for p in own}
    if any(p.kind is not plain and p.kind not in own_kinds for p in wanted):
        return Seen(DIFFERENT, "it does not take all further arguments")
    more = [p for p in own if p.kind in (plain, inspect.Parameter.KEYWORD_ONLY) and p.name not in names]
    if any(p.default is inspect.Parameter.empty for p in more):
        return Seen(DIFFERENT, "it needs further arguments")
    if more:
        extra.append("also takes " + ", ".join(f"`{p.name}=`" for p in more))
    return Seen(EXTENDED, "; ".join(extra)) if extra else Seen(SAME)


def _equal_default(source: str, value: Any, scope: Mapping[str, Any]) -> bool:
    try:
        wanted = eval(source, dict(scope))
    except (NameError, AttributeError):
        return False
    return bool(wanted is value or (type(wanted) is type(value) and wanted == value))


def _shown(value: Any) -> str:
    return f"`{value!r}`" if value is not inspect.Parameter.empty else "needed"


# -- verdicts ---------------------------------------------------------------------------------------------------------


def judge(name: str, seen: Seen, declared: str | None) -> Row:
    """The row of a name: what was seen and what ``verdicts.toml`` says of it (``"different: how"``).

    Raises:
        Stale: They contradict each other, or neither says how it differs or why it is absent.
    """
    if declared is None:
        if seen.verdict in (SAME, EXTENDED):
            return Row(name, seen.verdict, seen.difference if seen.verdict == EXTENDED else "")
        raise Stale(
            f"{name} is {seen.verdict} ({seen.difference or 'not there'}): say how or why in verdicts.toml"
        )
    verdict, _, note = (part.strip() for part in declared.partition(":"))
    if verdict not in (EXTENDED, DIFFERENT, ABSENT) or not note:
        raise Stale(f"{name}: {declared!r} is no verdict")
    if (verdict == ABSENT) != (seen.verdict == ABSENT):
        raise Stale(f"{name} is {seen.verdict}, not {verdict}: correct verdicts.toml")
    if verdict == EXTENDED and seen.verdict == DIFFERENT:
        raise Stale(f"{name} is different ({seen.difference}), not extended: correct verdicts.toml")
    if verdict == EXTENDED and seen.difference:
        note = f"{note}; {seen.difference}"
    return Row(name, verdict, note)


class Verdicts:
    """What ``verdicts.toml`` declares. Keys may have a ``*``; all must be used."""

    def __init__(self, declared: Mapping[str, str]) -> None:
        self._declared = declared
        self._used: set[str] = set()

    def of(self, name: str) -> str | None:
        """What is declared of a name, itself or by the longest pattern that fits."""
        patterns = [key for key in self._declared if fnmatchcase(name, key)]
        key = name if name in self._declared else max(patterns, key=len, default=None)
        if key is None:
            return None
        self._used.add(key)
        return self._declared[key]

    def unused(self) -> list[str]:
        return sorted(set(self._declared) - self._used)


# -- command line and variables ---------------------------------------------------------------------------------------


def look_at_option(names: Iterable[str]) -> Seen:
    """Compare an option of horovodrun with ``hvdlab run``'s declared ones."""
    from hvdlab.runner.flags import FLAGS

    for name in names:
        flag = next((flag for flag in FLAGS if name in (*flag.names, *flag.off)), None)
        if flag is None:
            return Seen(ABSENT)
        if flag.ineffective:
            return Seen(ABSENT, f"accepted without effect: {flag.ineffective}")
        if flag.meaning.startswith("refused: "):
            return Seen(ABSENT, flag.meaning)
    return Seen(SAME)


def look_at_variable(name: str, default: str) -> Seen:
    """Compare a variable with those that hvdlab declares."""
    from hvdlab.collectives.settings import VARIABLES, Reader, sizes

    variable = next((variable for variable in VARIABLES if variable.name == name), None)
    if variable is None and name in sizes(0, 1):
        own = name.replace("HOROVOD", "HVDLAB")
        return Seen(
            DIFFERENT, f"set for scripts to read; hvdlab itself reads `{own}`, or what the launcher sets"
        )
    if variable is None:
        return Seen(DIFFERENT if _is_used(name) else ABSENT)
    if variable.reader is Reader.NONE:
        return Seen(ABSENT, f"accepted without effect: {variable.meaning}")
    if default and variable.default != default:
        return Seen(DIFFERENT, f"{variable.default} if it is unset (Horovod: {default})")
    return Seen(SAME)


def _is_used(variable: str) -> bool:
    import hvdlab

    (package,) = hvdlab.__path__
    places = [
        path for path in Path(package).iterdir() if path.is_dir()
    ]  # links among them, which rglob skips
    files = (file for place in places for file in place.resolve().rglob("*.py"))
    return any(f'"{variable}"' in file.read_text() for file in files)


def _explained(name: str, seen: Seen, declared: str | None) -> Row:
    """As :func:`judge`, but what our own tables say of an option or a variable is explanation enough."""
    if declared is None and seen.difference:
        return Row(name, seen.verdict, seen.difference)
    return judge(name, seen, declared)


# -- the page ---------------------------------------------------------------------------------------------------------


def sections() -> Iterator[tuple[str, list[Row]]]:
    """Title and rows of all tables."""
    api = tomllib.loads((HERE / "api.toml").read_text())
    declared = Verdicts(tomllib.loads((HERE / "verdicts.toml").read_text()))
    problems: list[str] = []
    for module, names in api["names"].items():
        rows = []
        for name, described in names.items():
            full = f"{module}.{name}"
            try:
                rows.append(judge(full, look(module, name, described), declared.of(full)))
            except Stale as problem:
                problems.append(str(problem))
        yield (
            f"`{module}`",
            [Row(f"`{row.name.removeprefix(module + '.')}`", row.verdict, row.note) for row in rows],
        )
    others = {
        "Command line": [(key, look_at_option(key.split())) for key in api["options"]],
        "Variables": [(key, look_at_variable(key, value)) for key, value in api["variables"].items()],
    }
    for title, found in others.items():
        rows = []
        for key, seen in found:
            try:
                row = _explained(key, seen, declared.of(key))
                rows.append(Row(" ".join(f"`{part}`" for part in key.split()), row.verdict, row.note))
            except Stale as problem:
                problems.append(str(problem))
        yield title, rows
    yield (
        "Modules that come later",
        [Row(f"`{module}`", LATER, f"{count} names") for module, count in api["later"].items()],
    )
    problems += [f"{key} in verdicts.toml is no row" for key in declared.unused()]
    if problems:
        raise Stale("\n".join(problems))


INTRODUCTION = """\
# Horovod's names, one by one

What becomes of each public name of Horovod (0.28.1 and what came after it) when `import horovod` means hvdlab, or when
`hvdlab.torch` is imported in its place ([how to](../how-to/moving-from-horovod.md)). *Same*: same name, same arguments,
same meaning. *Extended*: also takes or does more. *Different*: how is said. *Absent*: why is said. The table is
made by `make tables` from the code; a test compares the two. Whether [attributes of objects](horovod-attributes.md) can be read and set is
on a page of its own.

The names of `horovod.tensorflow` and `horovod.keras` are not in it: each of them but the package `horovod.tensorflow.data` is there, with the same arguments in the same
order, which `tests/integration/tensorflow/test_names.py` checks. Those of [`horovod.ray`](../how-to/ray.md) and [`horovod.spark`](../how-to/spark.md) are on these pages.
"""


def page() -> str:
    """The whole page.

    Raises:
        Stale: Rows lack a verdict, or have one that is not true; the text lists all of them.
    """
    import hvdlab

    hvdlab.install_as_horovod(force=True)
    tables = list(sections())
    counts = Counter(row.verdict for _, rows in tables for row in rows)
    lines = [INTRODUCTION, "| " + " | ".join((*VERDICTS, LATER)) + " |", "|---" * (len(VERDICTS) + 1) + "|"]
    lines.append("| " + " | ".join(str(counts[verdict]) for verdict in (*VERDICTS, LATER)) + " |")
    for title, rows in tables:
        lines += ["", f"## {title}", "", "| name | | |", "|---|---|---|"]
        lines += [f"| {row.name} | {row.verdict} | {row.note.replace('|', chr(92) + '|')} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    return write_or_check(PAGE, page, __doc__)


if __name__ == "__main__":
    sys.exit(main())
