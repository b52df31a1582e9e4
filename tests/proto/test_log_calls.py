"""Every log call of the servers and the client says its values as fields, and none of them is a
user's key or value.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from koinon_proto.process.logs import OWN_KEYS

ROOT = Path(__file__).parents[2]
LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
FIELD = re.compile(r"\b([a-z][a-z0-9_]*)=%[-#0 +]*\d*(?:\.\d+)?([a-zA-Z])")
USER_DATA = {"key", "keys", "value", "values", "prefix", "rows", "records"}


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    for package in ("client", "coordinator", "node", "proto"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                continue
            for call in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(call, ast.Call)
                    and isinstance(call.func, ast.Attribute)
                    and call.func.attr in LEVELS
                    and isinstance(call.func.value, ast.Name)
                    and call.func.value.id == "log"
                ):
                    yield f"{path.relative_to(ROOT)}:{call.lineno}", call


def problem_of(call: ast.Call) -> str:
    """Return what is wrong with a call; '' if nothing is."""
    template = call.args[0]
    if not isinstance(template, ast.Constant) or not isinstance(template.value, str):
        return "the template is no literal"
    text = template.value.replace("%%", "")
    fields = [name for name, _ in FIELD.findall(text)]
    if len(fields) != text.count("%"):
        return "a placeholder is not key=%x"
    arguments = call.args[1:]
    if len(arguments) != len(fields) and not any(isinstance(a, ast.Starred) for a in arguments):
        return "placeholders and arguments differ in number"
    if len(set(fields)) != len(fields) or OWN_KEYS & set(fields):
        return "a field's name is taken"
    formats = [conversion for _, conversion in FIELD.findall(text)]
    shown = {_name(a) for a, format_ in zip(arguments, formats, strict=False) if format_ in "sr"}
    if USER_DATA & shown:
        return "a user's data might be logged"
    return ""


def _name(expression: ast.expr) -> str:
    """Return the last name of ``request.keys[0]``; none of ``plan.kind.value``, an enum's."""
    if isinstance(expression, ast.Subscript):
        return _name(expression.value)
    if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Attribute):
        return expression.attr if expression.attr != "value" else ""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def test_log_calls_say_their_values_as_fields_and_no_users_data() -> None:
    calls = list(log_calls())
    problems = {place: problem for place, call in calls if (problem := problem_of(call))}
    assert not problems
    assert len(calls) > 70


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('log.info("%s moves=%d", event, n)', "a placeholder is not key=%x"),
        ('log.info(f"moved {n}")', "the template is no literal"),
        ('log.info("moved n=%d")', "placeholders and arguments differ in number"),
        ('log.info("moved level=%d", n)', "a field's name is taken"),
        ('log.info("put what=%s", request.key)', "a user's data might be logged"),
        ('log.info("put first=%s", keys[0])', "a user's data might be logged"),
        ('log.info("put keys=%d full=%d%%", len(keys), share)', ""),
    ],
)
def test_problem_of_a_call_is_seen(source: str, problem: str) -> None:
    call = ast.parse(source, mode="eval").body
    assert isinstance(call, ast.Call)
    assert problem_of(call) == problem
