"""Lint of prose: how docstrings open, which phrases an error must avoid, and that public names are described.

Run as `python tools/lint_prose.py [--shrink]`; prints `path:line: message` for each breach and exits with 1
if there is one. Files listed in `tools/lint_prose_allowed.txt` are not held to the rules yet. The list only
shrinks: a listed file without a breach is an error, and `--shrink` takes such files off the list.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = ROOT / "tools" / "lint_prose_allowed.txt"
FOLDERS = ("src", "tests", "bench", "tools")
# A docstring that opens so needs its neighbours to be understood, but an editor shows it alone.
OPENING = re.compile(r"(The same|Of|What|Whether)\b")
# Calques: an error gives the key or file, the value, the reason and what would work instead. "cannot be read"
# is fine; a sentence that ends in "cannot be" is not.
PHRASE = re.compile(
    r"\b((?<!there )is no\b|are none\b|cannot be(?=[;:,.!]|$)|(leave|leaves|left) (\S+ )?away\b)"
)
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

Breach = tuple[int, str]


def breaches(source: str, library: bool = True) -> list[Breach]:
    """Return (line, message) of every breach in a module's source; only a `library` needs its docstrings."""
    tree = ast.parse(source)
    # A set, as the literal parts of an f-string are nodes of their own.
    found = {breach for node in ast.walk(tree) for breach in _breaches_of(node)}
    for node in tree.body if library else ():
        public = isinstance(node, NAMED) and not node.name.startswith("_")
        overload = public and "overload" in map(ast.unparse, node.decorator_list)
        if public and not overload and not ast.get_docstring(node):
            found.add((node.lineno, f"{node.name} is public and has no docstring"))
    return sorted(found)


def _breaches_of(node: ast.AST) -> Iterator[Breach]:
    # Bare strings are docstrings: of modules, classes and functions, and of the attributes above them.
    if isinstance(node, ast.Expr) and (match := OPENING.match(_text(node.value).lstrip())):
        yield node.lineno, f"docstring opens with {match[0]!r}; say what the thing is or returns"
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error"):
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        for part in (part for argument in arguments for part in ast.walk(argument)):
            if match := PHRASE.search(_text(part)):
                yield part.lineno, f"error says {match[0]!r}; give the value, the reason and the remedy"


def _text(node: ast.AST) -> str:
    """Return the words of a string literal, with `{}` for the values of an f-string; "" for other nodes."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def main() -> int:
    """Check all files and return the exit code."""
    found = {
        str(path.relative_to(ROOT)): breaches(path.read_text(encoding="utf-8"), library=folder == "src")
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    allowed = ALLOWED.read_text(encoding="utf-8").split() if ALLOWED.exists() else []
    if "--shrink" in sys.argv:
        allowed = [name for name in allowed if found.get(name)]
        ALLOWED.write_text("".join(f"{name}\n" for name in allowed), encoding="utf-8")
    lines = [
        f"{name}:{line}: {message}"
        for name, listed in found.items()
        if name not in allowed
        for line, message in listed
    ]
    lines += [f"{ALLOWED.name}: {name} is clean; take it off" for name in allowed if not found.get(name)]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
