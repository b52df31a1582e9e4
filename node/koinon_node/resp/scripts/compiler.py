"""Compiles a subset of Lua 5.1 to Python closures: enough for scripts of locks and rate limits.

The subset has locals, ``if``, ``while``, both kinds of ``for`` (over ``ipairs`` and ``pairs``),
``return``, ``break``, calls, tables and all operators. It has no functions, methods, ``repeat`` or
string patterns: a script that uses one is refused before it runs.

Each operation takes steps from a budget, more for long strings, and the nesting of a script is
bounded: no script can block a node. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from koinon_node.resp.scripts.values import (
    LuaError,
    Table,
    Value,
    are_equal,
    calculated,
    is_less,
    is_true,
    joined,
    number_of,
    type_of,
)

SCRIPT_BYTES_MAX = 16 * 1024
STEPS_MAX = 10_000
_STEP_BYTES = 1_024
_ENTRY_BYTES = 32
"""The steps that one entry of a table costs when a script walks the whole table."""
_DEPTH_MAX = 40
_KEYWORDS = frozenset(
    (
        *("and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in"),
        *("local", "nil", "not", "or", "repeat", "return", "then", "true", "until", "while"),
    )
)
_TOKEN = re.compile(
    rb"(?P<space>\s+|--\[\[.*?\]\]|--[^\n]*)"
    rb"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    rb"|(?P<number>0[xX][0-9a-fA-F]+|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    rb"|(?P<string>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|\[\[.*?\]\])"
    rb"|(?P<operator>\.\.|==|~=|<=|>=|[-+*/%^#<>=(){}\[\];:,.])",
    re.DOTALL,
)
_LONG = (b"[[", b"--[[")
_ESCAPES = dict(zip(b"abfnrtv", b"\a\b\f\n\r\t\v", strict=True))
_ESCAPED = re.compile(rb"\\([0-9]{1,3}|.)", re.DOTALL)
_LEVELS = (
    ("or",),
    ("and",),
    ("<", ">", "<=", ">=", "~=", "=="),
    ("..",),
    ("+", "-"),
    ("*", "/", "%"),
)
_BREAK = object()
"""The result of a ``break`` statement: the enclosing loop ends."""


class Frame:
    """One run of a script: its locals, its globals, and the steps that are left."""

    def __init__(self, size: int, names: Mapping[str, Value]) -> None:
        self.locals: list[Value] = [None] * size
        self.globals = names
        self.steps_left = STEPS_MAX

    def take(self, size: int = 0) -> None:
        """Take a step, and more for an operation on ``size`` bytes.

        Raises:
            LuaError: the budget is used up.
        """
        self.steps_left -= 1 + size // _STEP_BYTES
        if self.steps_left < 0:
            raise LuaError(b"the script takes more than %d steps" % STEPS_MAX)


class Returned(NamedTuple):
    """The result of a ``return`` statement: the script ends with this value."""

    value: Value


Expression = Callable[[Frame], Value]
Statement = Callable[[Frame], object]


class Script(NamedTuple):
    """A compiled script."""

    body: Statement
    size: int

    def run(self, names: Mapping[str, Value]) -> Value:
        """Run the script with these globals; return what it returns.

        Raises:
            LuaError: the script failed.
        """
        try:
            ended = self.body(Frame(self.size, names))
        except RecursionError:
            raise LuaError(b"an expression of the script is too long") from None
        except (ArithmeticError, TypeError, ValueError) as error:  # from invalid arguments
            raise LuaError(f"bad argument: {error}".encode()) from None
        return ended.value if isinstance(ended, Returned) else None


def compiled(source: bytes) -> Script:
    """Compile a script.

    Raises:
        LuaError: the source is not Lua, or uses a feature outside the subset.
    """
    if len(source) > SCRIPT_BYTES_MAX:
        raise LuaError(b"a script has %d bytes at most" % SCRIPT_BYTES_MAX)
    compiler = _Compiler(_tokens(source))
    try:
        body = compiler.block({}, ("",))
    except RecursionError:
        raise LuaError(b"the script is nested too deep") from None
    return Script(body, compiler.size)


class _Token(NamedTuple):
    kind: str  # name, number, string, operator, keyword; '' at the end
    text: str
    line: int
    value: Value = None


def _tokens(source: bytes) -> list[_Token]:
    found: list[_Token] = []
    at, line = 0, 1
    while at < len(source):
        if source.startswith(_LONG, at) and source.find(b"]]", at) < 0:
            raise LuaError(b"user_script:%d: unfinished long string/comment" % line)
        match = _TOKEN.match(source, at)
        if match is None:
            raise LuaError(b"user_script:%d: unexpected symbol" % line)
        kind, text = match.lastgroup or "", match[0]
        name = text.decode("latin-1")
        if kind == "string":
            found.append(_Token(kind, name, line, _string(text)))
        elif kind == "number":
            found.append(_Token(kind, name, line, number_of(text)))
        elif kind != "space":
            found.append(_Token("keyword" if name in _KEYWORDS else kind, name, line))
        line += text.count(b"\n")
        at = match.end()
    return [*found, _Token("", "<eof>", line)]


def _string(text: bytes) -> bytes:
    if text.startswith(b"[["):
        return text[2:-2].removeprefix(b"\n")
    return _ESCAPED.sub(_unescaped, text[1:-1])


def _unescaped(found: re.Match[bytes]) -> bytes:
    escape = found[1]
    if not escape.isdigit():
        return bytes([_ESCAPES.get(escape[0], escape[0])])
    if int(escape) > 255:
        raise LuaError(b"escape sequence too large near '\\%b'" % escape)
    return bytes([int(escape)])


class _Compiler:
    """A recursive-descent parser. ``scope`` maps the names of locals to their slots in the
    frame.
    """

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._loops = 0
        self.size = 0  # slots for locals

    # --- tokens ----------------------------------------------------------------------------

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _is(self, *texts: str) -> bool:
        return self._next.kind in ("keyword", "operator", "") and self._next.text in texts

    def _taken(self, *texts: str) -> bool:
        taken = self._is(*texts)
        self._at += taken
        return taken

    def _expect(self, text: str) -> None:
        if not self._taken(text):
            raise self._error(f"'{text}' expected near")

    def _name(self) -> str:
        token = self._next
        if token.kind != "name":
            raise self._error("name expected near")
        self._at += 1
        return token.text

    def _error(self, what: str) -> LuaError:
        return LuaError(f"user_script:{self._next.line}: {what} '{self._next.text}'".encode())

    def _deeper(self, by: int) -> None:
        self._depth += by
        if self._depth > _DEPTH_MAX:
            raise self._error(f"more than {_DEPTH_MAX} levels at")

    # --- statements ------------------------------------------------------------------------

    def block(self, scope: dict[str, int], ends: Sequence[str]) -> Statement:
        """Compile statements up to, and without, one of these words; '': up to the end."""
        self._deeper(1)
        scope = dict(scope)
        statements: list[Statement] = []
        while not self._is(*ends) and self._next.kind:
            is_last = self._is("return", "break")
            statements.append(self._statement(scope))
            self._taken(";")
            if is_last:
                break
        if not (self._is(*ends) or (ends == ("",) and not self._next.kind)):
            raise self._error("unexpected symbol near")
        self._deeper(-1)

        def run(frame: Frame) -> object:
            for statement in statements:
                if (ended := statement(frame)) is not None:
                    return ended
            return None

        return run

    def _place(self, scope: dict[str, int], name: str) -> int:
        scope[name] = self.size
        self.size += 1
        return scope[name]

    def _statement(self, scope: dict[str, int]) -> Statement:
        if self._taken("local"):
            return self._local(scope)
        if self._taken("if"):
            return self._if(scope)
        if self._taken("while"):
            return self._while(scope)
        if self._taken("for"):
            return self._for(scope)
        if self._taken("do"):
            body = self.block(scope, ("end",))
            self._expect("end")
            return body
        if self._taken("return"):
            ends = self._is("end", "else", "elseif", ";") or not self._next.kind
            value: Expression = (lambda _: None) if ends else self._expressions(scope)[0]
            return lambda frame: Returned(value(frame))
        if self._is("break") and self._loops:
            self._at += 1
            return lambda _: _BREAK
        if self._next.kind == "keyword":
            raise self._error("not in the subset of Lua that this server runs:")
        return self._call_or_assignment(scope)

    def _local(self, scope: dict[str, int]) -> Statement:
        names = [self._name()]
        while self._taken(","):
            names.append(self._name())
        values = self._expressions(scope) if self._taken("=") else []
        places = [self._place(scope, name) for name in names]

        def run(frame: Frame) -> None:
            frame.take()
            found = [value(frame) for value in values]
            for at, place in enumerate(places):
                frame.locals[place] = found[at] if at < len(found) else None

        return run

    def _call_or_assignment(self, scope: dict[str, int]) -> Statement:
        name = self._next.text
        start = self._at
        target = self._suffixed(scope)
        if not self._is("=", ","):
            last = self._tokens[self._at - 1]
            if last.text != ")" and last.kind != "string":  # no call
                raise self._error("unexpected symbol near")
            return lambda frame: (target(frame), None)[1]
        if self._is(",") or self._at > start + 1 or name not in scope:
            raise self._error("only a local variable can be assigned to, and one at a time, near")
        self._expect("=")
        place, value = scope[name], self._expression(scope)

        def run(frame: Frame) -> None:
            frame.take()
            frame.locals[place] = value(frame)

        return run

    def _if(self, scope: dict[str, int]) -> Statement:
        branches: list[tuple[Expression, Statement]] = []
        ends = ("elseif", "else", "end")
        condition = self._expression(scope)
        self._expect("then")
        branches.append((condition, self.block(scope, ends)))
        while self._taken("elseif"):
            condition = self._expression(scope)
            self._expect("then")
            branches.append((condition, self.block(scope, ends)))
        if self._taken("else"):
            branches.append((lambda _: True, self.block(scope, ("end",))))
        self._expect("end")

        def run(frame: Frame) -> object:
            for condition, body in branches:
                frame.take()
                if is_true(condition(frame)):
                    return body(frame)
            return None

        return run

    def _body(self, scope: dict[str, int]) -> Statement:
        self._expect("do")
        self._loops += 1
        body = self.block(scope, ("end",))
        self._loops -= 1
        self._expect("end")
        return body

    def _while(self, scope: dict[str, int]) -> Statement:
        condition = self._expression(scope)
        body = self._body(scope)

        def run(frame: Frame) -> object:
            while is_true(condition(frame)):
                frame.take()
                if (ended := body(frame)) is not None:
                    return None if ended is _BREAK else ended
            return None

        return run

    def _for(self, scope: dict[str, int]) -> Statement:
        names = [self._name()]
        while self._taken(","):
            names.append(self._name())
        inner = dict(scope)
        if self._taken("=") and len(names) == 1:
            bounds = self._expressions(scope)
            rows = _counted(bounds)
            if not 2 <= len(bounds) <= 3:
                raise self._error("'for' limit expected near")
        else:
            self._expect("in")
            rows = _pairs(self._expression(scope))
        places = [self._place(inner, name) for name in names[:2]]
        body = self._body(inner)

        def run(frame: Frame) -> object:
            for row in rows(frame):
                frame.take()
                for place, value in zip(places, row, strict=False):
                    frame.locals[place] = value
                if (ended := body(frame)) is not None:
                    return None if ended is _BREAK else ended
            return None

        return run

    # --- expressions -----------------------------------------------------------------------

    def _expressions(self, scope: dict[str, int]) -> list[Expression]:
        found = [self._expression(scope)]
        while self._taken(","):
            found.append(self._expression(scope))
        return found

    def _expression(self, scope: dict[str, int], level: int = 0) -> Expression:
        if level == len(_LEVELS):
            return self._unary(scope)
        self._deeper(level == 0)
        left = self._expression(scope, level + 1)
        while self._is(*_LEVELS[level]):
            operator = self._next.text
            self._at += 1
            rightwards = level if operator == ".." else level + 1
            left = _binary(operator, left, self._expression(scope, rightwards))
        self._deeper(-(level == 0))
        return left

    def _unary(self, scope: dict[str, int]) -> Expression:
        for operator in ("not", "-", "#"):
            if self._taken(operator):
                self._deeper(1)
                found = _unary(operator, self._unary(scope))
                self._deeper(-1)
                return found
        base = self._suffixed(scope)
        return _binary("^", base, self._unary(scope)) if self._taken("^") else base

    def _suffixed(self, scope: dict[str, int]) -> Expression:
        """Compile a value with the indexes and arguments that follow it."""
        value = self._primary(scope)
        while True:
            callee = self._tokens[self._at - 1].text
            if self._taken("."):
                name = self._name().encode()
                value = _index(value, lambda _, name=name: name)  # type: ignore[misc]
            elif self._taken("["):
                value = _index(value, self._expression(scope))
                self._expect("]")
            elif self._taken("("):
                arguments = [] if self._is(")") else self._expressions(scope)
                self._expect(")")
                value = _called(value, arguments, callee)
            elif self._next.kind == "string":
                text = self._next.value
                self._at += 1
                said: list[Expression] = [lambda _, text=text: text]  # type: ignore[misc]
                value = _called(value, said, callee)
            else:
                return value

    def _primary(self, scope: dict[str, int]) -> Expression:
        token = self._next
        if self._taken("("):
            value = self._expression(scope)
            self._expect(")")
            return value
        if self._taken("{"):
            return self._table(scope)
        constants: dict[str, Value] = {"nil": None, "true": True, "false": False}
        if token.kind in ("number", "string") or (
            token.kind == "keyword" and token.text in constants
        ):
            self._at += 1
            constant = constants[token.text] if token.kind == "keyword" else token.value
            return lambda _: constant
        name = self._name()
        if (place := scope.get(name)) is not None:
            return lambda frame: frame.locals[place]

        def global_(frame: Frame) -> Value:
            if name not in frame.globals:
                text = f"Script attempted to access nonexistent global variable '{name}'"
                raise LuaError(text.encode())
            return frame.globals[name]

        return global_

    def _table(self, scope: dict[str, int]) -> Expression:
        values: list[Expression] = []
        named: list[tuple[bytes, Expression]] = []
        while not self._taken("}"):
            if self._next.kind == "name" and self._tokens[self._at + 1].text == "=":
                name = self._name().encode()
                self._expect("=")
                named.append((name, self._expression(scope)))
            else:
                values.append(self._expression(scope))
            if not self._is("}") and not self._taken(",", ";"):
                raise self._error("'}' expected near")

        def run(frame: Frame) -> Value:
            frame.take()
            table = Table.of([value(frame) for value in values])
            table.update((name, value(frame)) for name, value in named)
            return table

        return run


# --- evaluation --------------------------------------------------------------------------------


def _binary(operator: str, left: Expression, right: Expression) -> Expression:
    if operator in ("and", "or"):
        wanted = operator == "and"

        def chosen(frame: Frame) -> Value:
            frame.take()
            value = left(frame)
            return right(frame) if is_true(value) is wanted else value

        return chosen

    def run(frame: Frame) -> Value:
        a, b = left(frame), right(frame)
        frame.take(sum(len(v) for v in (a, b) if isinstance(v, bytes)))
        match operator:
            case "==" | "~=":
                return are_equal(a, b) is (operator == "==")
            case "<":
                return is_less(a, b)
            case ">":
                return is_less(b, a)
            case "<=":
                return is_less(a, b) or are_equal(a, b)
            case ">=":
                return is_less(b, a) or are_equal(a, b)
            case "..":
                return joined(a, b)
            case _:
                return calculated(operator, a, b)

    return run


def _unary(operator: str, of: Expression) -> Expression:
    def run(frame: Frame) -> Value:
        frame.take()
        value = of(frame)
        if operator == "not":
            return not is_true(value)
        if operator == "-":
            return calculated("-", 0.0, value)
        if isinstance(value, Table):
            frame.take(_size_of(value))
            return float(len(value.array()))
        if isinstance(value, bytes):
            return float(len(value))
        raise LuaError(f"attempt to get length of a {type_of(value)} value".encode())

    return run


def _size_of(value: Value) -> int:
    if isinstance(value, Table):
        return len(value) * _ENTRY_BYTES
    return len(value) if isinstance(value, bytes) else 0


def _index(of: Expression, by: Expression) -> Expression:
    def run(frame: Frame) -> Value:
        frame.take()
        table, key = of(frame), by(frame)
        if not isinstance(table, Table):
            raise LuaError(f"attempt to index a {type_of(table)} value".encode())
        return None if isinstance(key, bool) else table.get(key)  # True is no 1, as in Python

    return run


def _called(function: Expression, arguments: Sequence[Expression], name: str) -> Expression:
    """Compile a call. ``name``, the last word of the called expression, is for the error
    message.
    """

    def run(frame: Frame) -> Value:
        called = function(frame)
        values = [argument(frame) for argument in arguments]
        frame.take(sum(map(_size_of, values)))
        if not callable(called):
            raise LuaError(f"attempt to call '{name}' (a {type_of(called)} value)".encode())
        return called(values)

    return run


def _counted(bounds: Sequence[Expression]) -> Callable[[Frame], Iterable[tuple[Value, ...]]]:
    def rows(frame: Frame) -> Iterator[tuple[Value, ...]]:
        first, last, *rest = [number_of(bound(frame)) for bound in bounds]
        step = rest[0] if rest else 1.0
        if first is None or last is None or not step:
            raise LuaError(b"'for' limit must be a number")
        while (first <= last) if step > 0 else (first >= last):
            yield (first,)
            first += step

    return rows


def _pairs(of: Expression) -> Callable[[Frame], Iterable[tuple[Value, ...]]]:
    """Return the rows of ``ipairs(x)`` or ``pairs(x)``, which this implementation builds as tables
    of (key, value).
    """

    def rows(frame: Frame) -> Sequence[tuple[Value, ...]]:
        table = of(frame)
        if not isinstance(table, Table):
            raise LuaError(b"a for loop iterates over ipairs or pairs only")
        return [tuple(row.array()) for row in table.array() if isinstance(row, Table)]

    return rows
