"""`lockstep.quantum` gives each public name, and loads nothing before it is asked for one."""

import ast
import inspect
import subprocess
import sys

import pytest

from lockstep import quantum


def names_for_type_checkers():
    """Each name that is imported under `TYPE_CHECKING`, with its module."""
    block = next(n for n in ast.parse(inspect.getsource(quantum)).body if isinstance(n, ast.If))
    return {a.name: node.module for node in block.body for a in node.names}


@pytest.mark.parametrize("name", quantum.__all__)
def test_each_public_name_is_what_type_checkers_see(name):
    value = getattr(quantum, name)
    assert (value.__name__, value.__module__) == (name, names_for_type_checkers()[name])


def test_type_checkers_see_no_other_names():
    assert sorted(names_for_type_checkers()) == sorted(quantum.__all__)


def test_all_public_names_are_listed_and_can_be_imported_at_once():
    assert set(quantum.__all__) <= set(dir(quantum))
    namespace = {}
    exec("from lockstep.quantum import *", namespace)
    assert set(quantum.__all__) <= set(namespace)


def test_another_name_is_an_attribute_error():
    with pytest.raises(
        AttributeError, match=r"'lockstep\.systems\.quantum' has no attribute 'Circut'"
    ):
        quantum.Circut  # noqa: B018


def test_importing_the_package_loads_nothing_else():
    script = (
        "import sys, lockstep.launching.systems; before = set(sys.modules); "
        "import lockstep.quantum; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) <= {
        "lockstep.quantum",
        "lockstep.systems",
        "lockstep.systems.quantum",
        "lockstep.config.lazy",
    }
