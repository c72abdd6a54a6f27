"""Takes a rule out of a module, for the length of a test."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FunctionType, ModuleType

import pytest


def take_out(monkeypatch: pytest.MonkeyPatch, module_name: str, old: str, new: str) -> None:
    """Replaces the one place of `module_name`'s source that reads `old` by `new`, in the module that others use.

    Functions and methods are replaced; classes stay the same ones, so that everybody agrees on them.
    """
    module = sys.modules[module_name]
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {module_name}"
    changed = ModuleType("changed")
    with monkeypatch.context() as context:
        context.setitem(sys.modules, changed.__name__, changed)  # where dataclasses look their annotations up
        exec(compile(source.replace(old, new), module.__file__, "exec"), changed.__dict__)
    for name, value in vars(changed).items():
        if isinstance(value, FunctionType) and value.__module__ == changed.__name__:
            monkeypatch.setattr(module, name, _at_home(value, module))
        elif isinstance(value, type) and value.__module__ == changed.__name__:
            _replace_methods(monkeypatch, getattr(module, name), value, module)


def _replace_methods(monkeypatch: pytest.MonkeyPatch, original: type, changed: type, module: ModuleType) -> None:
    for name, value in vars(changed).items():
        if isinstance(value, FunctionType):
            if value.__code__.co_filename == module.__file__:  # not what a dataclass generates
                monkeypatch.setattr(original, name, _at_home(value, module))
        elif isinstance(value, property) and isinstance(value.fget, FunctionType):
            monkeypatch.setattr(original, name, property(_at_home(value.fget, module)))


def _at_home(function: FunctionType, module: ModuleType) -> FunctionType:
    """The function with the globals of the module that it stands in for."""
    code, closure = function.__code__, function.__closure__
    moved = FunctionType(code, module.__dict__, function.__name__, function.__defaults__, closure)
    moved.__kwdefaults__ = function.__kwdefaults__
    return moved
