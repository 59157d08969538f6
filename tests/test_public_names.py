from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import mcp_resumable
from mcp_resumable import errors

PACKAGE = Path(mcp_resumable.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__") + sorted(
    f"redis.{path.stem}" for path in PACKAGE.glob("redis/*.py") if path.stem != "__init__"
)
CORE = ["cursor", "decision", "errors", "ring"]

# `logger` is private to its module by convention.
CONVENTIONAL = {"logger"}


@cache
def syntax_of(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))


def names_defined_in(module: str) -> set[str]:
    """Return the public names that a module binds itself, those that it imports left out."""
    names: set[str] = set()
    for node in syntax_of(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def all_of(module: str) -> list[str]:
    for node in syntax_of(module).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    pytest.fail(f"mcp_resumable.{module} has no __all__")


def imports_of(module: str) -> set[str]:
    """Return the dotted names of all modules that a module imports, also inside of functions and conditions."""
    names: set[str] = set()
    for node in ast.walk(syntax_of(module)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
    return names


def roots_of(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def loaded_by(modules: list[str], *options: str) -> set[str]:
    """Return the names in `sys.modules` of a new interpreter that imports `modules` under a stub of the package.

    The stub stands in for `mcp_resumable/__init__.py`, which imports everything.
    """
    script = f"""
import importlib, json, sys, types
package = types.ModuleType("mcp_resumable")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["mcp_resumable"] = package
before = set(sys.modules)
for module in {modules!r}:
    importlib.import_module("mcp_resumable." + module)
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, *options, "-c", script], check=True, capture_output=True, text=True)
    names: list[str] = json.loads(done.stdout)
    return set(names)


# Names.


def test_every_name_in_all_is_importable() -> None:
    assert [name for name in mcp_resumable.__all__ if not hasattr(mcp_resumable, name)] == []


def test_every_public_name_is_in_all() -> None:
    public = {
        name
        for name, value in vars(mcp_resumable).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(mcp_resumable.__all__) == public


def test_all_is_sorted_and_without_repetition() -> None:
    assert mcp_resumable.__all__ == sorted(set(mcp_resumable.__all__))


def test_every_error_of_a_resume_can_be_caught_by_a_name_of_the_package() -> None:
    assert {name for name in errors.__all__ if name.endswith("Error")} <= set(mcp_resumable.__all__)


def test_names_of_the_package_are_the_objects_of_its_modules() -> None:
    homes = {name: [module for module in MODULES if name in all_of(module)] for name in mcp_resumable.__all__}
    for name, modules in homes.items():
        assert modules == [getattr(mcp_resumable, name).__module__.removeprefix("mcp_resumable.")]


@pytest.mark.parametrize("module", MODULES)
def test_all_of_a_module_is_what_it_defines(module: str) -> None:
    defined = names_defined_in(module) - CONVENTIONAL
    assert set(all_of(module)) == defined


@pytest.mark.parametrize("module", MODULES)
def test_all_of_a_module_repeats_nothing(module: str) -> None:
    assert len(all_of(module)) == len(set(all_of(module)))


# Direction of imports.


def test_core_needs_no_package_but_the_standard_library() -> None:
    # -I -S: no site-packages, so that anything installed is missing. Python 3.10 has no `assert_never` of its own.
    options = ["-I", "-S"] if sys.version_info >= (3, 11) else ["-I"]
    foreign = {
        name
        for name in roots_of(loaded_by(CORE, *options))
        if name not in sys.stdlib_module_names and name != "mcp_resumable"
    }
    assert foreign <= (set() if sys.version_info >= (3, 11) else {"typing_extensions"})


def test_core_loads_nothing_of_the_package_but_itself() -> None:
    assert {name for name in loaded_by(CORE) if name.startswith("mcp_resumable")} == {
        "mcp_resumable.cursor",
        "mcp_resumable.decision",
        "mcp_resumable.errors",
        "mcp_resumable.ring",
    }


@pytest.mark.parametrize("module", CORE)
def test_core_imports_no_clock_no_randomness_no_logging_and_no_loop(module: str) -> None:
    allowed = {
        "__future__",
        "base64",
        "binascii",
        "collections",
        "dataclasses",
        "re",
        "sys",
        "typing",
        "typing_extensions",
    }
    assert roots_of(imports_of(module)) <= allowed | {"mcp_resumable"}


@pytest.mark.parametrize("module", ["memory", "storage"])
def test_storage_knows_nothing_of_http_or_mcp(module: str) -> None:
    loaded = loaded_by([module])
    assert f"mcp_resumable.{module}" in loaded
    assert roots_of(loaded) & {"httpx", "mcp", "mcp_types", "sse_starlette", "starlette", "uvicorn"} == set()
    assert {name for name in loaded if name.startswith("mcp_resumable")} <= {
        f"mcp_resumable.{name}" for name in [*CORE, "eviction", "memory", "storage"]
    }


def test_mcp_is_imported_where_it_must_be_and_nowhere_else() -> None:
    assert [module for module in MODULES if "mcp" in roots_of(imports_of(module))] == ["attach", "http", "store"]


def test_starlette_is_imported_nowhere() -> None:
    assert [module for module in MODULES if "starlette" in roots_of(imports_of(module))] == []


# What is missing.


def test_without_redis_py_the_import_says_which_extra_to_install() -> None:
    script = """
import sys
sys.modules["redis"] = None
try:
    import mcp_resumable.redis
except ImportError as exc:
    print(exc)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "pip install 'mcp_resumable[redis]'" in done.stdout
