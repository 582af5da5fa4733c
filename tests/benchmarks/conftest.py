# SPDX-License-Identifier: Apache-2.0
"""The programs in ``benchmarks/``, which import each other as scripts of one folder do."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def load_benchmark():
    """A function of a program's name that returns its module."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(BENCHMARKS))
