# SPDX-License-Identifier: Apache-2.0
"""Registration, in fresh processes: what it adds, what it refuses, and what it leaves alone."""

import importlib
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import vllm.plugins.b12x_mla_sparse as plugin

ROOT = Path(__file__).parents[2]
GATHER, MIN, MAX, MIXED, SHARD, EARLY, DEBUG, REFERENCE = (flag.name for flag in plugin.FLAGS)


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    """Run ``code`` in a fresh interpreter without this suite's flags."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_B12X")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_fresh_process_registers_in_time_without_cuda_or_models():
    result = run(
        "import sys, time, torch\n"
        "import vllm.v1.attention.backends.registry as r\n"
        "members = r.AttentionBackendEnum.__members__\n"
        "stock = {name: member.value for name, member in members.items()}\n"
        "start = time.perf_counter()\n"
        "from vllm.plugins.b12x_mla_sparse import register, register_platform\n"
        "assert register() is None and register_platform() is None\n"
        "print('SECONDS', time.perf_counter() - start)\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not [m for m in sys.modules if m.startswith('vllm.models')]\n"
        "after = {name: member.value for name, member in members.items()}\n"
        "path = after.pop('B12X_MLA_SPARSE')\n"
        "assert path == 'vllm.v1.attention.backends.mla.b12x_mla_sparse.B12xMLASparseBackend'\n"
        "assert r.AttentionBackendEnum['B12X_MLA_SPARSE'].get_path() == path\n"
        "assert after == stock\n"
        "assert set(r._ATTN_OVERRIDES) == {r.AttentionBackendEnum['B12X_MLA_SPARSE']}\n"
        "import vllm.envs as envs\n"
        "print('FLAGS', envs.VLLM_B12X_MLA_CKV_GATHER, envs.VLLM_B12X_MLA_CKV_GATHER_MIN_TOKENS,\n"
        "      envs.VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS)\n"
    )
    assert result.returncode == 0, result.stderr
    assert float(re.search(r"SECONDS (\S+)", result.stdout)[1]) < 2
    assert "FLAGS False 16 None" in result.stdout


def test_registering_again_changes_nothing():
    plugin.register()
    hooks = len(sys.meta_path)
    member = plugin.AttentionBackendEnum[plugin.BACKEND_NAME]
    plugin.register()
    plugin.register_platform()
    assert plugin.AttentionBackendEnum[plugin.BACKEND_NAME] is member
    assert list(plugin.AttentionBackendEnum).count(member) == 1
    assert len(sys.meta_path) == hooks


def test_entry_points_of_both_groups_lead_here():
    for group, function in (
        ("vllm.general_plugins", plugin.register),
        ("vllm.platform_plugins", plugin.register_platform),
    ):
        (entry,) = entry_points(group=group, name="b12x_mla_sparse")
        assert entry.load() is function


def test_attention_config_accepts_the_name_before_general_plugins_load():
    result = run(
        "from vllm.platforms import current_platform\n"
        "current_platform.device_type\n"
        "import vllm.plugins\n"
        "assert not vllm.plugins.plugins_loaded\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum\n"
        "print('BACKEND', AttentionBackendEnum['B12X_MLA_SPARSE'].name)\n"
    )
    assert "BACKEND B12X_MLA_SPARSE" in result.stdout, result.stderr


def test_member_reaches_a_spawned_process_that_has_loaded_no_plugin():
    plugin.register()
    member = plugin.AttentionBackendEnum[plugin.BACKEND_NAME]
    context = multiprocessing.get_context("spawn")
    result = run(
        # Pickled here as an argument would be; the child unpickles before it imports any plugin.
        "import pickle, sys\n"
        f"member = pickle.loads(bytes.fromhex({pickle.dumps(member).hex()!r}))\n"
        "import vllm.plugins\n"
        "assert not vllm.plugins.plugins_loaded\n"
        "print('GOT', member.name, member.get_path())\n"
        "assert pickle.loads(pickle.dumps(member)) is member\n"
    )
    assert f"GOT {plugin.BACKEND_NAME} {plugin.BACKEND_PATH}" in result.stdout, result.stderr
    parent, child = context.Pipe()
    process = context.Process(target=spawned, args=(member, child))
    process.start()
    assert parent.poll(100), "the child did not answer"
    assert parent.recv() is member
    process.join(20)
    assert process.exitcode == 0


def spawned(member, connection) -> None:
    connection.send(member)


def test_copying_keeps_the_member():
    import copy

    plugin.register()
    member = plugin.AttentionBackendEnum[plugin.BACKEND_NAME]
    assert copy.deepcopy(member) is member
    assert copy.copy(member) is member


@pytest.mark.parametrize(
    ("name", "text"),
    [(GATHER, text) for text in ("", "2", "true", "on", " 1", "01", "-1", "AUTO", "auto ")]
    + [(MIN, text) for text in ("", "-1", "1.5", "16k", "1_000", " 16", "524289", "٣", "9" * 30)]
    + [(MAX, text) for text in ("", "0", "-1", "none", "0x10", "524289", "1e5")]
    + [(SHARD, "auto"), (EARLY, "2"), (REFERENCE, "yes")],
)
def test_malformed_flag_is_refused_naming_all_three(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    flag = next(flag for flag in plugin.FLAGS if flag.name == name)
    with pytest.raises(ValueError) as error:
        plugin.register()
    for part in (name, repr(text), flag.accepted):
        assert part in str(error.value)
    assert plugin.BACKEND_NAME in plugin.AttentionBackendEnum.__members__
    assert plugin.register_platform() is None


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        (GATHER, "0", False),
        (GATHER, "1", True),
        (GATHER, "auto", "auto"),
        (MIN, "0", 0),
        (MIN, "524288", 524_288),
        (MAX, "17", 17),
        (MAX, "524288", 524_288),
    ],
)
def test_accepted_flag_reads_through_vllm_envs(monkeypatch, name, text, value):
    import vllm.envs as envs

    if name == MIN and value == 524_288:
        monkeypatch.delenv(MAX, raising=False)
    monkeypatch.setenv(name, text)
    plugin.register()
    assert getattr(envs, name) == value
    assert type(getattr(envs, name)) is type(value)


def test_vllm_knows_every_variable_of_ours():
    """vLLM warns about variables that it does not know, or refuses them if it is told to."""
    from vllm.platforms.ckv_reference import environment

    result = run(
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from vllm.platforms import current_platform\n"
        "current_platform.validate_environ(hard_fail=True)\n",
        **(environment() | {flag.name: "1" for flag in plugin.FLAGS if flag.name != MIN}),
        **{MIN: "0"},
    )
    assert result.returncode == 0, result.stderr
    named = set()
    for folder in ("vllm", "tools", "examples", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".sh", ".service", ".md"):
                named |= set(re.findall(r"VLLM_(?:B12X|CKV)_\w*[A-Z]\b", path.read_text()))
    assert named - {flag.name for flag in plugin.FLAGS} == set()


@pytest.mark.parametrize("found", ["0.32.1", "0.34.0", "0.330.0"])
def test_other_version_is_one_line_and_no_exception(found):
    result = run(
        "import importlib.metadata as metadata\n"
        "real = metadata.version\n"
        f"metadata.version = lambda name: {found!r} if name == 'vllm' else real(name)\n"
        "from vllm.plugins.b12x_mla_sparse import register, register_platform\n"
        "register_platform(); register(); register()\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum\n"
        "assert 'B12X_MLA_SPARSE' not in AttentionBackendEnum.__members__\n"
        "import vllm.envs as envs\n"
        "assert 'VLLM_B12X_MLA_CKV_GATHER' not in envs.environment_variables\n",
        VLLM_B12X_MLA_CKV_GATHER="nonsense",
    )
    assert result.returncode == 0, result.stderr
    output = result.stdout + result.stderr
    lines = [line for line in output.splitlines() if "vllm-b12x-ckv" in line]
    assert len(lines) == 1
    assert f"works with vLLM 0.33.x, found {found}" in lines[0]


@pytest.mark.parametrize("found", ["0.33.0", "0.33.2", "0.33.1+cu129", "0.33"])
def test_supported_versions(monkeypatch, found):
    monkeypatch.setattr(plugin, "version", lambda name: found)
    assert plugin.version_is_supported()


def test_bad_flag_stops_general_plugins_but_not_the_platform():
    result = run(
        "from vllm.platforms import current_platform\n"
        "current_platform.device_type\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n",
        VLLM_B12X_MLA_CKV_GATHER="yes",
        VLLM_PLUGINS="b12x_mla_sparse",
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert (
        last == "ValueError: VLLM_B12X_MLA_CKV_GATHER='yes' is not accepted: set it to 0, 1 or auto"
    )
    assert result.stderr.count("Traceback") == 1


@pytest.fixture
def fake_model(tmp_path, monkeypatch):
    """A package with a user of indexers, and modules of ours that count their registrations."""
    for name in ("user", "ours", "layer", "broken"):
        sys.modules.pop(f"fake_model.{name}", None)
    sys.modules.pop("fake_model", None)
    package = tmp_path / "fake_model"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "user.py").write_text("DONE = True\n")
    (package / "ours.py").write_text(
        "from fake_model.user import DONE\nassert DONE\nCALLS = []\n"
        "def register():\n    CALLS.append(1)\n"
    )
    (package / "layer.py").write_text("CALLS = []\ndef register():\n    CALLS.append(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugin, "MLA_MODULE", "fake_model.layer")
    monkeypatch.setattr(plugin, "INDEXER_USER", "fake_model.user")
    monkeypatch.setattr(plugin, "INDEXER_MODULE", "fake_model.ours")
    monkeypatch.setattr(
        sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, plugin._ImportHook)]
    )
    return package


def test_indexer_is_registered_when_its_user_is_imported_and_not_before(fake_model):
    plugin._arrange_hooks()
    assert "fake_model.ours" not in sys.modules
    importlib.import_module("fake_model.user")
    assert sys.modules["fake_model.ours"].CALLS == [1]


def test_indexer_is_registered_at_once_when_its_user_is_there_already(fake_model):
    importlib.import_module("fake_model.user")
    plugin._arrange_hooks()
    assert sys.modules["fake_model.ours"].CALLS == [1]


def test_the_layer_is_replaced_for_later_engines_as_well(fake_model, monkeypatch):
    """The model's module is imported once a process, with the flags of the first engine."""
    monkeypatch.setenv(EARLY, "0")
    plugin._arrange_hooks()
    importlib.import_module("fake_model.user")
    assert sys.modules["fake_model.layer"].CALLS == [1]


def test_missing_indexer_module_is_no_error(fake_model):
    (fake_model / "ours.py").unlink()
    plugin._arrange_hooks()
    assert importlib.import_module("fake_model.user").DONE


def test_error_in_the_indexer_module_is_not_hidden(fake_model):
    (fake_model / "ours.py").write_text("raise RuntimeError('broken indexer')\n")
    plugin._arrange_hooks()
    with pytest.raises(RuntimeError, match="broken indexer"):
        importlib.import_module("fake_model.user")


class Platform:
    """As much of a vLLM platform as the hardware remark reads."""

    def __init__(self, capability: tuple[int, int] | None) -> None:
        from vllm.platforms.interface import DeviceCapability

        self.capability = capability and DeviceCapability(*capability)

    def is_cuda(self) -> bool:
        return self.capability is not None

    def get_device_capability(self):
        return self.capability

    def has_device_capability(self, wanted: int) -> bool:
        return self.capability.to_int() >= wanted

    def is_device_capability_family(self, family: int) -> bool:
        return self.capability.to_int() // 10 == family // 10


@pytest.mark.parametrize(
    ("capability", "b12x", "parts"),
    [
        (None, True, ["NVIDIA GPU", "another attention backend"]),
        ((7, 5), True, ["8.0 or newer", "7.5"]),
        ((12, 0), False, ["b12x is not installed", "Triton", "vllm-b12x-ckv[b12x]"]),
        ((12, 1), False, ["b12x is not installed"]),
        ((12, 0), True, None),
        ((9, 0), False, None),
        ((8, 0), False, None),
    ],
)
def test_hardware_remark(monkeypatch, capability, b12x, parts):
    monkeypatch.delenv("VLLM_CKV_REFERENCE", raising=False)
    there = {"b12x": b12x, plugin.B12X_PROVIDER: True}
    monkeypatch.setattr(plugin, "find_spec", lambda name: there[name] or None)
    remark = plugin.hardware_remark(Platform(capability))
    if parts is None:
        assert remark is None
        return
    assert "\n" not in remark
    for part in parts:
        assert part in remark


def test_missing_b12x_is_not_mentioned_before_there_is_a_provider_for_it(monkeypatch):
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    assert plugin.hardware_remark(Platform((12, 0))) is None


def test_the_reference_platform_needs_no_gpu(monkeypatch):
    monkeypatch.setenv("VLLM_CKV_REFERENCE", "1")
    assert plugin.hardware_remark(Platform(None)) is None


@pytest.mark.parametrize(("flag", "lines"), [("0", 0), ("1", 1)])
def test_without_a_gpu_one_line_and_only_when_asked_for(flag, lines):
    result = run(
        "from vllm.plugins.b12x_mla_sparse import register, register_platform\n"
        "register_platform(); register(); register()\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum\n"
        "assert 'B12X_MLA_SPARSE' in AttentionBackendEnum.__members__\n",
        VLLM_B12X_MLA_CKV_GATHER=flag,
        VLLM_CKV_REFERENCE="0",
    )
    assert result.returncode == 0, result.stderr
    output = result.stdout + result.stderr
    assert output.count("B12X_MLA_SPARSE needs an NVIDIA GPU") == lines


def test_the_worker_locks_once_after_its_own_warm_up(monkeypatch):
    from types import SimpleNamespace

    from vllm.v1.attention.backends.mla.ckv_gather import startup

    calls = []

    class Worker:
        def compile_or_warm_up_model(self):
            calls.append("warm-up")
            return "times"

    monkeypatch.setitem(sys.modules, plugin.WORKER_MODULE, SimpleNamespace(Worker=Worker))
    monkeypatch.setattr(startup, "lock_after_warm_up", lambda worker: calls.append("lock"))
    plugin._lock_after_warm_up()
    plugin._lock_after_warm_up()
    assert Worker().compile_or_warm_up_model() == "times"
    assert calls == ["warm-up", "lock"]


def test_the_worker_is_wrapped_when_its_module_is_imported_and_not_before():
    result = run(
        "import os; os.environ.update({'VLLM_CKV_REFERENCE': '1'})\n"
        "from vllm.platforms.ckv_reference import environment\n"
        "os.environ.update(environment())\n"
        "import sys\n"
        "from vllm.plugins.b12x_mla_sparse import register\n"
        "register()\n"
        "assert 'vllm.v1.worker.gpu_worker' not in sys.modules\n"
        "from vllm.v1.worker.gpu_worker import Worker\n"
        "register()\n"
        "print('LOCKS', Worker.compile_or_warm_up_model.locks_workspace)\n"
    )
    assert "LOCKS True" in result.stdout, result.stderr


def test_readme_lists_every_flag_as_the_table_has_it():
    readme = (ROOT / "README.md").read_text()
    for flag in plugin.FLAGS:
        default = {False: "0", None: "unset"}.get(flag.default, str(flag.default))
        row = f"| `{flag.name}` | {flag.accepted} | {default} | {flag.meaning} |"
        assert row in readme, f"README.md lacks this row:\n{row}"
