# SPDX-License-Identifier: Apache-2.0
"""Build guard: the wheel may hold only files that stock vLLM does not own.

The overlay is unpacked beside stock vLLM, into the same ``vllm/`` folder. A file that both
distributions own would be overwritten on install and deleted on uninstall, so a clash is a build
error. The installed vLLM's own file list (its ``RECORD``) is the authority.
"""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


def stock_files() -> set[str]:
    """Paths owned by the installed ``vllm`` distribution; empty when vLLM is not installed."""
    try:
        return {str(path) for path in files("vllm") or []}
    except PackageNotFoundError:
        return set()


def clashes(ours: list[str], stock: set[str]) -> list[str]:
    """Files of ours that stock vLLM owns as well, sorted.

    An ``__init__.py`` counts also when stock has none at that path but owns the package: it would
    turn somebody else's package into ours.
    """
    owned_packages = {path.rsplit("/", 1)[0] for path in stock if path.endswith(".py")}
    bad = {path for path in ours if path in stock}
    bad |= {
        path
        for path in ours
        if path.endswith("/__init__.py") and path.rsplit("/", 1)[0] in owned_packages
    }
    return sorted(bad)


class build_py_guarded(build_py):
    """``build_py`` that refuses to package a file stock vLLM owns."""

    def run(self) -> None:
        root = Path(__file__).parent
        ours = [str(path.relative_to(root)) for path in sorted(root.glob("vllm/**/*.py"))]
        bad = clashes(ours, stock_files())
        if bad:
            raise SystemExit(
                "refusing to build: stock vLLM owns " + ", ".join(bad) + "; rename or remove them"
            )
        super().run()


if __name__ == "__main__":
    setup(cmdclass={"build_py": build_py_guarded})
