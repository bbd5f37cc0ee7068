"""Every example in a docstring is run, with `torch`, `regard` and the public names at hand."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import regard
from cases import ABSENT

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
FINDER = doctest.DocTestFinder(exclude_empty=True)


def examples():
    """Every docstring with an example, by its full name."""
    names = ["regard", *(module.name for module in pkgutil.walk_packages(regard.__path__, "regard."))]
    for name in names:
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(name)
        for test in FINDER.find(module, name):
            if test.examples:
                yield test


def namespace() -> dict[str, object]:
    return {"torch": torch, "regard": regard} | {name: getattr(regard, name) for name in regard.__all__}


def run(test: doctest.DocTest) -> str:
    """What was said about the examples that failed; nothing if all of them are right."""
    said: list[str] = []
    test.globs = test.globs | namespace()
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("test", list(examples()), ids=lambda test: test.name)
def test_the_example_of(test):
    if ABSENT and test.name == "regard.functional.plan":
        pytest.skip("prints a plan of the compiled library")
    said = run(test)
    assert not said, said


def test_an_example_that_is_wrong_is_noticed():
    wrong = doctest.DocTestParser().get_doctest(
        ">>> Causal().draw(2, 2)\n'# #'\n>>> torch.zeros(1)\ntensor([0.])\n", {}, "wrong", None, 0
    )
    said = run(wrong)
    assert "'# .\\n# #'" in said
    assert said.count("Failed example") == 1


def test_examples_are_found():
    assert {"regard.masks.positional.Causal", "regard.functional.plan", "regard.biases.Alibi"} <= {
        test.name for test in examples()
    }
