"""Names and line numbers of cells: a rank's cell is compiled as if it stood in the notebook.

The notebook's cell begins with the magic's line, which the rank does not get; the source is moved down by as many
lines. The file name is the same on all ranks, so that warnings and tracebacks of equal cells are equal.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import linecache
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

from IPython.core import prefilter
from IPython.core.autocall import IPyAutocall
from IPython.core.compilerop import CachingCompiler
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.macro import Macro

from hvdlab.collectives.text import register_label

_NUMBERED = re.compile(r"\[(\d+)\]\Z")

_FIRST_WORD = re.compile(r"\s*([^\W\d][\w.]*)(?![\w.*])")
"""The beginning of a line that IPython looks up as a magic or macro."""

_CELL = re.compile(r"<cell (.*?)(?: #[0-9a-f]{6})?>\Z", re.DOTALL)

_ATTEMPTS = 8

MOST_KNOWN = 64
"""Sources whose transformed texts are kept."""
LONGEST_KNOWN = 10_000
"""Characters of a source that is kept at most."""

MOST_PARSED = 8
"""Cells that are kept parsed and compiled: of 500 characters, one takes 40 kB of each rank's memory."""
LONGEST_PARSED = 2_000
"""Characters of such a cell at most. To parse a longer one takes little beside what it does."""


def parse(source: str, filename: str = "<unknown>", symbol: str = "exec", flags: int = 0) -> ast.AST:
    """Parse, again where another thread parsed at the same time.

    Python 3.11 counts the depth of the tree that it builds in one place for all threads. If the collection of garbage
    runs a finalizer meanwhile, another thread may build a tree of its own before this one goes on, and the source,
    which is right, ends in ``SystemError: AST constructor recursion depth mismatch``.

    Raises:
        SyntaxError: The source is no Python.
        ValueError: It holds a null character.
        SystemError: Another thread parsed during each of several attempts.
    """
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(SystemError):
            return _parse_once(source, filename, symbol, flags)
    return _parse_once(source, filename, symbol, flags)


def _parse_once(source: str, filename: str, symbol: str, flags: int) -> ast.AST:
    tree = compile(source, filename, symbol, flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.AST)
    return tree


def cell_number(label: str) -> int | None:
    """7 for ``[7]``, None for a label that is no cell's number."""
    match = _NUMBERED.match(label)
    return int(match[1]) if match else None


def label_of(filename: str) -> str:
    """``[7]`` for the file name that a cell is compiled under, an empty text for any other."""
    match = _CELL.match(filename)
    return match[1] if match else ""


class StaticTransforms:
    """IPython's transformers of a cell's text, which are called once for a source that comes again.

    They turn magics and prompts into Python and depend on the text alone. They tokenize it in Python, which was the larger part of a rank's
    work for a short cell; a script that calls ``pool.run`` in a loop sends the same source each time. Where the user has added,
    removed or replaced a transformer, which may count its calls or look around, all are called each time.

    Args:
        manager: The shell's ``input_transformer_manager``.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._transform: Callable[[str], str] = manager.transform_cell
        self._transform_once = lru_cache(MOST_KNOWN)(self._transform)
        # Not the manager's own: a startup file of the user's has perhaps changed them.
        self._original = _transformers(TransformerManager())

    def transform_cell(self, cell: str) -> str:
        """Return the cell as Python. Any thread.

        Raises:
            SyntaxError: A transformer refuses the text.
        """
        known = len(cell) <= LONGEST_KNOWN and _transformers(self._manager) == self._original
        return self._transform_once(cell) if known else self._transform(cell)


def _transformers(manager: Any) -> tuple[list[Any], ...]:
    return [*manager.cleanup_transforms], [*manager.line_transforms], [*manager.token_transformers]


class LinePrefilter:
    """IPython's prefilter of cells of one line, which is called only for a line that it may change.

    It turns a line whose first word is a magic, a macro or an object that calls itself (``exit``) into Python. It asks seven checkers for
    that, which took a tenth of a rank's work for a short cell. Where the user has added a checker or a transformer of lines, or has
    switched one on, every line goes through it.

    Args:
        shell: The rank's shell.
    """

    #: IPython's checkers that look at nothing but the first word and ``autocall``.
    _BY_WORD = frozenset(
        {
            prefilter.MacroChecker,
            prefilter.IPyAutocallChecker,
            prefilter.AssignmentChecker,
            prefilter.AutoMagicChecker,
            prefilter.PythonOpsChecker,
            prefilter.AutocallChecker,
        }
    )

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._manager = shell.prefilter_manager
        self._prefilter: Callable[..., str] = self._manager.prefilter_lines
        #: The manager's checkers when a line was last asked for.
        self._checkers: list[Any] = []
        #: Those of them that may change other lines if they are switched on.
        self._checkers_of_lines: list[Any] = []

    def prefilter_lines(self, lines: str, continue_prompt: bool = False) -> str:
        """Return the lines as Python, without a newline at their end."""
        text = lines.rstrip("\n")
        return text if self._is_plain(text) else self._prefilter(lines, continue_prompt)

    def _is_plain(self, line: str) -> bool:
        word = _FIRST_WORD.match(line)
        shell, manager = self._shell, self._manager
        if word is None or "\n" in line or shell.autocall or manager.transformers:
            return False
        if manager.checkers != self._checkers:
            self._checkers = [*manager.checkers]
            self._checkers_of_lines = [each for each in self._checkers if type(each) not in self._BY_WORD]
        if any(checker.enabled for checker in self._checkers_of_lines):
            return False
        value = shell.user_ns.get(word[1])
        return not isinstance(value, (Macro, IPyAutocall)) and shell.find_magic(word[1]) is None


class ParsedCell:
    """A cell that is parsed and compiled once, although it comes again.

    Args:
        tree: The cell.

    Attributes:
        tree: The cell.
        statements: Identities of the statements of ``tree``; it keeps them alive, so that no other has one of these.
        codes: The code of statements, by the statement's identity, the kind of code and the compiler's flags.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.statements = frozenset(map(id, tree.body))
        self.codes: dict[tuple[int, str, int], CodeType] = {}


class CompilerFlags:
    """Context in which a compiler has further flags, as ``CachingCompiler.extra_flags`` makes it.

    Args:
        compiler: The compiler.
        flags: Those to set. It keeps all that it has got meanwhile, such as that of a ``__future__`` statement.
    """

    __slots__ = ("_added", "_compiler")

    def __init__(self, compiler: CellCompiler, flags: int) -> None:
        self._compiler, self._added = compiler, ~compiler.flags & flags

    def __enter__(self) -> None:
        self._compiler.flags |= self._added

    def __exit__(self, *_: object) -> None:
        self._compiler.flags &= ~self._added


class CellCompiler(CachingCompiler):
    """IPython's compiler, which calls cells of the pool by their label: ``Cell In[7], line 4``.

    Args:
        shell: The rank's shell.

    Attributes:
        files: The file by which a frontend's debugger knows a cell, to the name that the cell was compiled under last.
    """

    def __init__(self, shell: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # IPython is partly untyped
        self._shell = shell
        self._parse_cell_once = lru_cache(MOST_PARSED)(self._parse_cell)
        #: The cell that was parsed last, if it may come again.
        self._parsed: ParsedCell | None = None
        self._source: str | None = None
        self._name = ""
        self._lines = 0
        #: Whether the cell is of a program, which may send it again; one of a notebook has another name each time.
        self._recurs = False
        self._names: dict[str, str] = {}
        self.files: dict[str, str] = {}

    def expect(self, source: str, label: str, lines: int, file: str = "") -> str:
        """Announce the next code to be compiled, ``source``, with ``lines`` lines above it.

        Args:
            source: The cell.
            label: The name by which users know it; an empty text for a cell of a program's, which is named by its text.
            lines: Lines above the source.
            file: The file by which a frontend's debugger knows the cell.

        Returns:
            The file name that the code will be compiled under.
        """
        # Without a label by the text: a program that runs a cell in a loop would add a name, and lines for tracebacks, each time.
        name = f"<cell {label or _digest(f'{lines} {source}', 12)}>"
        known = self._names.get(name)
        if known not in (None, source):  # another notebook, or a restarted one, has the same numbers
            name = f"<cell {label} #{_digest(source, 6)}>"
            known = self._names.get(name)
        self._source, self._name, self._lines, self._recurs = source, name, lines, not label
        # Not for a cell that comes again, such as that of a script which calls ``pool.run`` in a loop.
        if known != source:
            self._names[name] = source
            self._introduce(name)
        if file:
            self.files[file] = name
        return name

    def _introduce(self, name: str) -> None:
        """Let sites and tracebacks call code that is compiled under this name a cell."""
        register_label(name, f"cell {label_of(name)}")
        # Else inspect looks for the file in every imported module, for each frame of a traceback: seconds, with torch.
        for place in (name, os.path.normcase(os.path.abspath(name))):
            inspect.modulesbyfile[place] = "__main__"

    def cells(self) -> dict[str, tuple[str, str]]:
        """File name of each cell to its source and the lines that tracebacks show."""
        # A copy: a thread that makes a snapshot reads this while the main thread compiles cells.
        return {
            name: (source, "".join(linecache.getlines(name))) for name, source in dict(self._names).items()
        }

    def adopt(self, cells: Mapping[str, tuple[str, str]]) -> None:
        """Know the cells of another rank, whose functions come to this one; those that ran here stay what they are."""
        for name, (source, text) in cells.items():
            if name not in self._names:
                self._names[name] = source
                self._introduce(name)
                # Without a time: linecache.checkcache(), which every traceback calls, would drop an entry
                # whose file is missing.
                linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        """Return the file name that the code is compiled under."""
        # Only the cell itself: code that it runs by shell.run_cell() keeps the name that IPython gives it.
        if self._source is not None and raw_code == self._source:
            return self._name
        return str(super().get_code_name(raw_code, transformed_code, number))

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Name the code and keep its lines for tracebacks."""
        if self._source is not None and raw_code == self._source:
            transformed_code = "\n" * self._lines + transformed_code
        return super().cache(transformed_code, number, raw_code)

    def extra_flags(self, flags: int) -> CompilerFlags:  # type: ignore[override]  # a context as IPython's, made with fewer calls
        """Return the context in which the compiler has these flags as well."""
        return CompilerFlags(self, flags)

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> ast.AST:
        """Parse, with the line numbers of the notebook."""
        if filename != self._name:
            return parse(source, filename, symbol, self.flags)
        if not self._recurs or len(source) > LONGEST_PARSED or self._changes_trees():
            self._parsed = None
            return self._parse_cell(source, filename, self._lines, self.flags).tree
        self._parsed = self._parse_cell_once(source, filename, self._lines, self.flags)
        return self._parsed.tree

    def _changes_trees(self) -> bool:
        """Return whether the shell changes a tree before it is compiled."""
        shell = self._shell
        return bool(shell.ast_transformers) or shell.ast_node_interactivity == "last_expr_or_assign"

    @staticmethod
    def _parse_cell(source: str, filename: str, lines: int, flags: int) -> ParsedCell:
        tree = parse("\n" * lines + source, filename, "exec", flags)
        assert isinstance(tree, ast.Module)
        return ParsedCell(tree)

    def __call__(self, source: Any, filename: str, symbol: str, **options: Any) -> CodeType:
        """Compile a text or tree; IPython calls this for a tree of each statement of a cell.

        The code of a statement is kept for the case that the cell comes again, unless it defines functions or classes: ``torch.compile``
        and debuggers know functions by their code, and would mistake new ones for the old.
        """
        body = source.body if isinstance(source, ast.Module | ast.Interactive) else []
        parsed = self._parsed
        if parsed is None or len(body) != 1 or id(body[0]) not in parsed.statements:
            return self._compile(source, filename, symbol, **options)
        key = id(body[0]), symbol, self.flags
        code = parsed.codes.get(key)
        if code is None:
            code = self._compile(source, filename, symbol, **options)
            if not any(isinstance(constant, CodeType) for constant in code.co_consts):
                parsed.codes[key] = code
        return code

    def _compile(self, source: Any, filename: str, symbol: str, **options: Any) -> CodeType:
        code: CodeType = super().__call__(source, filename, symbol, **options)
        return code

    def format_code_name(self, name: str) -> Any:
        """Return the kind and the name by which a traceback calls code of this file name."""
        if name in self._names:
            label = label_of(name)
            return "Cell", f"In{label}" if cell_number(label) is not None else label
        return super().format_code_name(name)

    def forget(self) -> None:
        """Drop the sources from Python's line cache."""
        for name in self._names:
            linecache.cache.pop(name, None)


def _digest(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:digits]


def without_blank_head(source: str) -> tuple[str, int]:
    """Return the source without the empty lines it begins with, and their number (IPython would drop them uncounted)."""
    lines = source.splitlines(keepends=True)
    blank = 0
    while blank < len(lines) and not lines[blank].strip():
        blank += 1
    return "".join(lines[blank:]), blank
