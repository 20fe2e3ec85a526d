from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import settings

# on CI the same examples every time; elsewhere new ones, which is how new faults are found
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

SHARED = Path(__file__).resolve().parents[2] / "shared"
CORPUS = sorted((SHARED / "corpus").glob("*.hlo.pb.gz"))


def corpus(platform: str) -> list:
    """Corpus modules of a platform as pytest parameters; one skipped parameter where the corpus is not at hand."""
    found = [p for p in CORPUS if p.name.startswith(platform + "_")]
    if not found:
        return [pytest.param(None, marks=pytest.mark.skip(reason="shared/corpus is not here"))]
    return [pytest.param(p, id=p.name.split(".")[0]) for p in found]


def read_corpus(path: Path) -> tuple[bytes, int]:
    """(serialized module, temp in bytes as XLA reported it, to 0.1 MiB)."""
    truth = json.loads((path.parent / "truth.json").read_text())
    return gzip.open(path).read(), int(truth[path.name]["temp_mib"] * 2**20)
