"""`lockstep.quantum` and `lockstep.sketch` load a module only when one of its names is used."""

import ast
import inspect
import re
import subprocess
import sys

import pytest

from lockstep import quantum, sketch

PACKAGES = {"quantum": quantum, "sketch": sketch}
NAMES = [(package, name) for package in PACKAGES.values() for name in package.__all__]


def names_for_type_checkers(package):
    """Each name that is imported under `TYPE_CHECKING`, with its module."""
    block = next(n for n in ast.parse(inspect.getsource(package)).body if isinstance(n, ast.If))
    return {a.name: node.module for node in block.body for a in node.names}


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_each_public_name_is_what_type_checkers_see(package, name):
    value = getattr(package, name)
    assert (value.__name__, value.__module__) == (name, names_for_type_checkers(package)[name])


@pytest.mark.parametrize("name", PACKAGES)
def test_all_public_names_are_listed_and_can_be_imported_at_once(name):
    package = PACKAGES[name]
    assert sorted(names_for_type_checkers(package)) == sorted(package.__all__)
    assert set(package.__all__) <= set(dir(package))
    namespace = {}
    exec(f"from lockstep.{name} import *", namespace)
    assert set(package.__all__) <= set(namespace)


@pytest.mark.parametrize("package", PACKAGES.values())
def test_another_name_is_an_attribute_error(package):
    message = f"'{package.__name__}' has no attribute 'Circut'"
    with pytest.raises(AttributeError, match=re.escape(message)):
        package.Circut  # noqa: B018


def test_importing_the_packages_loads_no_module_of_theirs():
    script = (
        "import sys, lockstep; before = set(sys.modules); import lockstep.quantum, lockstep.sketch;"
        "print(*set(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = {*done.stdout.split()}
    rooms = ("lockstep.systems.quantum", "lockstep.systems.sketched")
    assert {"lockstep.quantum", "lockstep.sketch"} <= loaded
    assert {name for name in loaded if name.startswith(rooms)} == {*rooms}
    assert not loaded & {"torch", "numpy", "scipy", "qiskit", "matplotlib"}
