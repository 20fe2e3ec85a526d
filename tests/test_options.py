"""Options: what is accepted, what is refused with a reason."""

from __future__ import annotations

import dataclasses

import pytest

from hlo_memopt import Options


def test_defaults_are_the_contracts():
    assert dataclasses.asdict(Options()) == {
        "reorder": True,
        "pack": True,
        "elide_copies": True,
        "recompute": "off",
        "memory_limit": None,
        "temp_limit": None,
        "effort": "default",
        "solver": "cbc",
        "time_limit": None,
        "strict": False,
        "verify": False,
    }


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("recompute", "auto", "not available in this version"),
        ("recompute", "cheap", "not available in this version"),
        ("recompute", "always", "must be 'off'"),
        ("memory_limit", "12GiB", "not available in this version"),
        ("temp_limit", 4096, "not available in this version"),
        ("effort", "maximal", "effort must be"),
        ("solver", "gurobi", "must be 'cbc' or 'highs'"),
        ("solver", "CBC", "must be 'cbc' or 'highs'"),
        ("solver", None, "must be 'cbc' or 'highs'"),
        ("time_limit", 0, "positive number"),
        ("time_limit", float("nan"), "positive number"),
        ("time_limit", "3s", "positive number"),
        ("time_limit", True, "positive number"),
        ("strict", 1, "True or False"),
        ("pack", None, "True or False"),
    ],
)
def test_refused(field, value, words):
    with pytest.raises(ValueError, match=words) as caught:
        Options(**{field: value})
    assert field in str(caught.value)


def test_frozen_hashable_and_equal_by_value():
    assert Options(time_limit=2.5) == Options(time_limit=2.5)
    assert len({Options(), Options(), Options(verify=True), Options(solver="highs")}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().strict = True
