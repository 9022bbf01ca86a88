"""The sentences of exceptions, found in the code without running it. A value that is filled in is `VALUE`."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

VALUE = "‹value›"
#: What a function calls the parameter that it gives to an exception.
SENTENCE = "sentence"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def text_of(node: ast.AST) -> str | None:
    """The text of a string, of an f-string or of a format; None for other nodes."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\{[\w!]*\}", VALUE, node.value)
    return None


class Sentences:
    """What calls of `kinds` get as their first argument, in these files: text, constants, and what functions pass on.

    A function that gives its parameter `SENTENCE` to such a call counts as one of them. `found` has file and line,
    class, and sentence; `unknown` the calls whose sentence was not found.
    """

    def __init__(self, kinds: Iterable[str], files: Iterable[Path]) -> None:
        self._modules = {file: ast.parse(file.read_text()) for file in files}
        self._values: dict[str, list[ast.expr]] = defaultdict(list)  # of constants, class attributes and keywords
        self._functions: dict[tuple[Path, str], list[Function]] = defaultdict(list)
        self._homes: dict[ast.AST, Path] = {}
        self._inside: dict[ast.AST, Function] = {}
        for file, module in self._modules.items():
            self._read(file, module)
        self._takes = {kind: (kind, 0, "") for kind in kinds}  # what a call says: a class, and which argument says it
        self.found: set[tuple[str, str, str]] = set()
        self.unknown: set[str] = set()
        while self._pass():
            pass

    def _read(self, file: Path, module: ast.Module) -> None:
        for node in ast.walk(module):
            self._homes[node] = file
            if isinstance(node, Function):
                self._functions[file, node.name].append(node)
                self._inside.update((inner, node) for inner in ast.walk(node))  # the innermost comes last
            elif isinstance(node, ast.keyword) and node.arg:
                self._values[node.arg].append(node.value)
            elif isinstance(node, ast.AnnAssign | ast.Assign) and node.value:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Attribute) or node not in self._inside:
                        self._values[ast.unparse(target).split(".")[-1]].append(node.value)

    def _pass(self) -> bool:
        """Whether another function was found that passes a sentence on."""
        known, self.unknown = len(self._takes), set()
        for file, module in self._modules.items():
            for call in ast.walk(module):
                if not isinstance(call, ast.Call) or (name := ast.unparse(call.func).split(".")[-1]) not in self._takes:
                    continue
                kind, index, keyword = self._takes[name]
                given = [*call.args[index : index + 1], *(k.value for k in call.keywords if k.arg == keyword)]
                for sentence in (text for one in given for text in self._texts(one, kind, call)):
                    where = f"{file.name}:{call.lineno}"
                    if sentence.replace(VALUE, "").strip(" :"):
                        self.found.add((where, kind, sentence))
                    else:
                        self.unknown.add(f"{where} {ast.unparse(call)}")
        return len(self._takes) > known

    def _texts(self, node: ast.expr, kind: str, at: ast.AST) -> Iterator[str]:
        match node:
            case ast.Constant() | ast.JoinedStr():
                yield from [text] if (text := text_of(node)) else []
            case ast.IfExp():
                yield from self._texts(node.body, kind, at)
                yield from self._texts(node.orelse, kind, at)
            case ast.Call(func=ast.Attribute(value=text, attr="format")):
                yield from self._texts(text, kind, at)
            case ast.Call(func=ast.Name(id=name)) if known := self._functions.get((self._homes[at], name)):
                for function in known:
                    returned = [inner.value for inner in ast.walk(function) if isinstance(inner, ast.Return)]
                    yield from (text for one in returned if one for text in self._texts(one, kind, one))
            case ast.Attribute(attr=name) if name != SENTENCE:
                texts = [value for value in self._values[name] if isinstance(value, ast.Constant | ast.JoinedStr)]
                names = [value for value in self._values[name] if isinstance(value, ast.Name) and value.id.isupper()]
                yield from (text for value in texts + names for text in self._texts(value, kind, value))
                if not texts + names:
                    yield VALUE
            case ast.Name(id=name):
                yield from self._of_name(name, kind, at)
            case ast.Attribute():  # of a table, whose rows are calls of a kind
                return
            case _:
                yield VALUE

    def _of_name(self, name: str, kind: str, at: ast.AST) -> Iterator[str]:
        function = self._inside.get(at)
        arguments = [] if function is None else [each.arg for each in function.args.args]
        if function is not None and name in arguments:
            if name != SENTENCE:
                yield VALUE
                return
            index = arguments.index(name) - (arguments[0] == "self")
            self._takes.setdefault(function.name, (kind, index, name))
            return
        if name.isupper():
            yield from (text for value in self._values[name] for text in self._texts(value, kind, value))
            return
        for inner in () if function is None else ast.walk(function):
            if isinstance(inner, ast.Assign | ast.NamedExpr | ast.AugAssign) and not isinstance(inner.value, ast.Name):
                targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                if name in map(ast.unparse, targets):
                    yield from self._texts(inner.value, kind, inner)
