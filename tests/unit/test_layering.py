"""The dependency rules of the project, read from the imports of every file.

Each rule is also shown to bite: a mutant source that breaks it must be reported.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]

# What a package may import of ours, besides itself. deploy starts the commands and imports neither package.
OURS: Final[dict[str, tuple[str, ...]]] = {
    "proxy": (),
    "replica": ("coordinator", "kernels", "proxy.protocol"),
    "kernels": (),
    "coordinator": (),
    "deploy": (),
}
# In the replica, the server's own parts, and engine.py, which runs the app that it builds; the rest, formats of
# requests and answers included, knows nothing of HTTP.
AIOHTTP: Final = (
    "proxy/",
    *(f"replica/api/{name}.py" for name in ("server", "middleware", "generation", "http_io")),
    "replica/registration.py",
    "replica/engine.py",
)
# The only places that may import a package: folders end with a slash. Packages that are not here may be used anywhere.
HOMES: Final[dict[str, tuple[str, ...]]] = {
    "aiohttp": AIOHTTP,
    "multidict": AIOHTTP,  # types of aiohttp's interface
    "yarl": AIOHTTP,
    "redis": ("coordinator/",),
    "triton": ("kernels/",),
    "torch": ("kernels/", "replica/"),
    "safetensors": ("replica/weights.py",),
    "ray": ("replica/executor_ray.py",),
    "llguidance": ("replica/api/grammar.py",),
    "tokenizers": ("replica/api/tokenizer.py",),
    "jinja2": ("replica/api/chat.py", "replica/api/template_sandbox.py"),
    "transformers": (),
}
# Processes that must start fast and stay small, and what they must never load, directly or through others of ours.
LIGHT_PROCESSES: Final[dict[str, tuple[str, ...]]] = {
    "proxy.cli": ("torch", "triton", "tokenizers", "coordinator"),
    "replica.cli": ("torch", "triton", "coordinator", "redis"),
    "replica.engine": ("torch", "triton", "coordinator", "redis"),
}
# What a file imports only in a function: a replica alone loads no coordinator, one whose ranks are here no ray.
# tests/unit/test_replica_alone.py sees that it does not.
DEFERRED: Final[dict[str, tuple[str, ...]]] = {
    "replica/engine.py": ("replica.group_clock", "replica.executor_ray"),
    "replica/supervisor.py": ("replica.group_master",),
}
SCRIPTS: Final = "deploy/models/"  # training scripts: they run alone, beside the project


def project_files() -> dict[str, str]:
    """Path from the root -> source, of every file under the rules."""
    paths = (path for package in OURS for path in sorted((ROOT / package).rglob("*.py")))
    files = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return {path: source for path, source in files.items() if not path.startswith(SCRIPTS)}


def declared_packages() -> set[str]:
    """The import names of pyproject's dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = (re.match(r"[\w-]+", line) for line in project["dependencies"])
    return {name[0].replace("-", "_").lower() for name in names if name}


def imports(path: str, source: str) -> Iterator[str]:
    """Dotted names that a file imports; `from a import b` gives a.b, wherever in the file it stands."""
    folder = path.split("/")[:-1]
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = folder[: len(folder) - node.level + 1] if node.level else []
            base = [*parents, *filter(None, [node.module])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def is_within(name: str, module: str) -> bool:
    """Whether a dotted name is a module or something in it."""
    return name == module or name.startswith(module + ".")


def violations(path: str, source: str, declared: set[str]) -> list[str]:
    """What a file imports against the rules, one line each."""
    package = path.split("/")[0]
    found = []
    for name in imports(path, source):
        top = name.split(".")[0]
        if top == package or top in sys.stdlib_module_names:
            continue
        if top in OURS:
            if not any(is_within(name, allowed) for allowed in OURS[package]):
                found.append(f"{path}: {package} may not import {name}")
        elif top in HOMES:
            if not path.startswith(HOMES[top]):
                found.append(f"{path}: {top} has its home in {', '.join(HOMES[top]) or 'tests'}")
        elif top not in declared:
            found.append(f"{path}: {top} is no dependency in pyproject.toml")
    return found


def loaded_by(module: str, files: dict[str, str]) -> dict[str, str]:
    """Every name that a module of ours loads, directly or through others of ours -> the file that imports it."""
    names: dict[str, str] = {}
    to_do, seen = [module], set()
    while to_do:
        for path in _files_of(to_do.pop(), files):
            if path in seen:
                continue
            seen.add(path)
            for name in imports(path, files[path]):
                if any(is_within(name, deferred) for deferred in DEFERRED.get(path, ())):
                    continue
                names.setdefault(name, path)
                to_do.append(name)
    return names


def _files_of(name: str, files: dict[str, str]) -> list[str]:
    """The files that importing a dotted name runs: every package on the way, and the module. Outsiders have none."""
    parts = name.split(".")
    stems = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return [path for stem in stems for path in (f"{stem}/__init__.py", f"{stem}.py") if path in files]


def heavy_imports(module: str, files: dict[str, str]) -> list[str]:
    """What a light process would load and must not."""
    return [
        f"{module} loads {name} through {path}"
        for name, path in loaded_by(module, files).items()
        if any(is_within(name, forbidden) for forbidden in LIGHT_PROCESSES[module])
    ]


def test_every_file_imports_only_what_its_package_may() -> None:
    declared = declared_packages()
    files = project_files()
    assert {path.split("/")[0] for path in files} == set(OURS)
    assert [line for path, source in files.items() for line in violations(path, source, declared)] == []


@pytest.mark.parametrize("module", LIGHT_PROCESSES)
def test_a_light_process_loads_nothing_heavy(module: str) -> None:
    files = project_files()
    assert module.replace(".", "/") + ".py" in files
    assert heavy_imports(module, files) == []


@pytest.mark.parametrize(
    ("path", "source", "reported"),
    [
        ("proxy/app.py", "import replica.request", "proxy may not import replica.request"),
        ("proxy/app.py", "from kernels import rms_norm", "proxy may not import kernels.rms_norm"),
        ("proxy/app.py", "import torch", "torch has its home in"),
        ("coordinator/clock.py", "from proxy.protocol import Hello", "coordinator may not import proxy.protocol"),
        ("kernels/fp8.py", "from replica.layers import Linear", "kernels may not import replica.layers"),
        ("deploy/serve_demo.py", "from proxy.cli import main", "deploy may not import proxy.cli"),
        ("replica/api/server.py", "from proxy.registry import Registry", "replica may not import proxy.registry"),
        ("replica/api/server.py", "from proxy import registry", "replica may not import proxy.registry"),
        ("replica/api/server.py", "import deploy.serve_demo", "replica may not import deploy.serve_demo"),
        ("replica/scheduler.py", "import aiohttp", "aiohttp has its home in"),
        ("replica/scheduler.py", "def f():\n    from aiohttp import web", "aiohttp has its home in"),
        ("kernels/rms_norm.py", "import aiohttp", "aiohttp has its home in"),
        ("proxy/registry.py", "import redis.asyncio", "redis has its home in coordinator/"),
        ("replica/layers.py", "import triton.language as tl", "triton has its home in kernels/"),
        ("replica/worker.py", "from safetensors import safe_open", "safetensors has its home in replica/weights.py"),
        ("replica/executor_mp.py", "import ray", "ray has its home in replica/executor_ray.py"),
        ("replica/api/server.py", "from tokenizers import Tokenizer", "tokenizers has its home in"),
        ("replica/api/server.py", "import jinja2.sandbox", "jinja2 has its home in"),
        ("replica/api/tokenizer.py", "from transformers import AutoTokenizer", "transformers has its home in tests"),
        ("replica/models/qwen3.py", "from ...proxy import app", "replica may not import proxy.app"),
        ("proxy/app.py", "import flask", "flask is no dependency in pyproject.toml"),
    ],
)
def test_a_forbidden_import_is_reported(path: str, source: str, reported: str) -> None:
    (line,) = violations(path, source, declared_packages())
    assert reported in line


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("replica/registration.py", "from proxy.protocol import Hello\nfrom proxy import protocol\nimport aiohttp"),
        ("replica/models/qwen3.py", "from ..layers import Linear\nimport kernels\nimport torch\nimport numpy"),
        ("coordinator/keys.py", "import os.path\nfrom . import messages"),
    ],
)
def test_an_allowed_import_is_not_reported(path: str, source: str) -> None:
    declared = declared_packages()
    assert violations(path, source, declared | {"redis"}) == []


def test_a_heavy_import_is_found_through_other_modules() -> None:
    files = {
        "replica/engine.py": "from replica.api.server import build_app",
        "replica/api/server.py": "from replica import sampler",
        "replica/__init__.py": "",
        "replica/sampler.py": "import torch.nn",
    }
    assert heavy_imports("replica.engine", files) == ["replica.engine loads torch.nn through replica/sampler.py"]


def test_a_package_s_own_init_counts_as_loaded_with_its_modules() -> None:
    files = {
        "replica/engine.py": "from replica.a.b import c",
        "replica/a/__init__.py": "import torch",
        "replica/a/b.py": "",
    }
    assert heavy_imports("replica.engine", files) == ["replica.engine loads torch through replica/a/__init__.py"]
