# SPDX-License-Identifier: Apache-2.0
"""The build guard: nothing that stock vLLM owns may be packaged."""

import importlib.util
from importlib.metadata import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def load_setup():
    spec = importlib.util.spec_from_file_location("overlay_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setup_module():
    return load_setup()


def test_file_owned_by_stock_is_a_clash(setup_module):
    assert setup_module.clashes(["vllm/envs.py", "vllm/plugins/mine.py"], {"vllm/envs.py"}) == [
        "vllm/envs.py"
    ]


def test_init_in_stock_package_is_a_clash_even_if_stock_has_none(setup_module):
    stock = {"vllm/plugins/other.py"}
    assert setup_module.clashes(["vllm/plugins/__init__.py"], stock) == ["vllm/plugins/__init__.py"]


def test_own_sub_package_is_no_clash(setup_module):
    stock = {"vllm/plugins/__init__.py"}
    assert setup_module.clashes(["vllm/plugins/mine/__init__.py"], stock) == []


def test_installed_vllm_is_seen_and_the_tree_is_clean(setup_module):
    stock = setup_module.stock_files()
    assert "vllm/envs.py" in stock
    ours = [str(p.relative_to(ROOT)) for p in ROOT.glob("vllm/**/*.py")]
    assert setup_module.clashes(ours, stock) == []


def test_build_refuses_and_names_the_file(setup_module, monkeypatch, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "envs.py").write_text("")
    monkeypatch.setattr(setup_module, "__file__", str(tmp_path / "setup.py"))
    from setuptools import Distribution

    command = setup_module.build_py_guarded(Distribution())
    with pytest.raises(SystemExit, match=r"refusing to build.*vllm/envs\.py"):
        command.run()


def test_no_installed_file_belongs_to_both_distributions():
    ours = {str(path) for path in files("vllm-b12x-ckv") or []}
    assert ours, "the overlay is not installed: run make install"
    assert not ours & {str(path) for path in files("vllm") or []}
