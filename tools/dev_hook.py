# SPDX-License-Identifier: Apache-2.0
"""Makes this checkout's files importable beside stock vLLM, ahead of an installed copy.

``pip install -e`` cannot do this: a package is found in one place only, and ``vllm`` is found in
site-packages. This writes a small import hook into the running interpreter's site-packages; it
answers only for modules this checkout has, or the checkout that CKV_DEV_ROOT names. Remove
``_ckv_dev.pth`` there to undo it.
"""

import sysconfig
from pathlib import Path

HOOK = """\
import os
import sys
from importlib.util import spec_from_file_location

ROOT = os.environ.get("CKV_DEV_ROOT", {root!r})


class CheckoutFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if not name.startswith("vllm."):
            return None
        base = os.path.join(ROOT, *name.split("."))
        init = os.path.join(base, "__init__.py")
        if os.path.isfile(init):
            return spec_from_file_location(name, init, submodule_search_locations=[base])
        if os.path.isfile(base + ".py"):
            return spec_from_file_location(name, base + ".py")
        return None


sys.meta_path.insert(0, CheckoutFinder)
"""


def main() -> None:
    site = Path(sysconfig.get_paths()["purelib"])
    root = str(Path(__file__).resolve().parents[1])
    (site / "_ckv_dev.py").write_text(HOOK.format(root=root))
    (site / "_ckv_dev.pth").write_text("import _ckv_dev\n")
    print(f"{site / '_ckv_dev.pth'}: vLLM modules of {root} are importable")


if __name__ == "__main__":
    main()
