"""inspect.signature for compiled calls: help(), editors and tests see names and defaults."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from typing import Any

from kvleaf import _kvleaf


def install(public: Iterable[Any]) -> None:
    """Names the package as the home of what is public; compiled calls tell their signature."""
    for thing in public:
        if isinstance(thing, type):
            thing.__module__ = "kvleaf"
            if hasattr(thing.__dict__.get("__init__"), "__nb_signature__"):
                thing.__signature__ = _ClassSignature()  # type: ignore[attr-defined]
    _kvleaf._tell_signatures(property(_signature), property(_bound_signature))


class _ClassSignature:
    """Of a class and those derived from it: early 3.11 sees only an __init__ in Python."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        for base in owner.__mro__:
            init = base.__dict__.get("__init__")
            if hasattr(init, "__nb_signature__"):
                return _bound_signature(init)
            if init is not None:
                break
        raise AttributeError("__signature__")  # inspect finds it by itself


def _bound_signature(method: Any) -> inspect.Signature:
    signature = _signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _signature(function: Any) -> inspect.Signature:
    overloads = function.__nb_signature__
    if len(overloads) != 1:
        raise AttributeError(f"{function.__name__} has {len(overloads)} signatures")
    text, _, defaults = overloads[0]
    # A default that is no literal stands as \N, an index into the values.
    for index in reversed(range(len(defaults or ()))):
        text = text.replace(f"\\{index}", f"_defaults[{index}]")
    definition = ast.parse(text.rpartition("\n")[2] + ": ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args

    def value_of(node: ast.expr | None) -> Any:
        if node is None:
            return inspect.Parameter.empty
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            key = ast.literal_eval(node.slice)
            if node.value.id == "_defaults":
                return defaults[key]
            return getattr(_kvleaf, node.value.id)[key]  # of an enum
        return ast.literal_eval(node)

    def parameter(argument: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
        annotation = (
            ast.unparse(argument.annotation) if argument.annotation else inspect.Parameter.empty
        )
        return inspect.Parameter(
            argument.arg, kind, default=value_of(default), annotation=annotation
        )

    positional: list[tuple[ast.arg, Any]] = []
    positional += [(a, inspect.Parameter.POSITIONAL_ONLY) for a in arguments.posonlyargs]
    positional += [(a, inspect.Parameter.POSITIONAL_OR_KEYWORD) for a in arguments.args]
    values: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    values += arguments.defaults
    parameters = [parameter(a, kind, value) for (a, kind), value in zip(positional, values)]
    parameters += [
        parameter(a, inspect.Parameter.KEYWORD_ONLY, value)
        for a, value in zip(arguments.kwonlyargs, arguments.kw_defaults)
    ]
    returns = ast.unparse(definition.returns) if definition.returns else inspect.Signature.empty
    return inspect.Signature(parameters, return_annotation=returns)
