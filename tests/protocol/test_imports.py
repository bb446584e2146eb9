import subprocess
import sys

import pytest

LIGHT = [
    "",
    ".keys",
    ".meta",
    ".batch_meta",
    ".dispatch",
    ".rpc",
    ".request",
    ".channel",
    ".fields",
    ".trajectory",
    ".groups",
    ".generate",
    ".learn",
    ".weights",
    ".interfaces",
    ".equality",
]


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_everything_but_the_tensor_modules_imports_without_torch():
    names = ", ".join(f"streamrl.protocol{name}" for name in LIGHT)
    code = f"import sys, {names}; from streamrl.protocol import BatchMeta, KVBatchMeta, TrajectoryKey\n"
    code += "from streamrl.protocol.dispatch import dispatch, is_chunkable\n"
    code += "assert not is_chunkable(3); dispatch([KVBatchMeta('t', ['A_0_0'], [{}])], {'x': 1}, 1)\n"
    code += "KVBatchMeta.concat([KVBatchMeta('t', ['A_0_0'], [{}], extra_info={'a': 1}), KVBatchMeta('t', ['B_0_0'], [{}], extra_info={'a': 1})])\n"
    code += "heavy = {'torch', 'tensordict', 'ray'} & sys.modules.keys(); assert not heavy, heavy"
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_tensor_modules_import_in_any_order():
    lines = [
        "from streamrl.protocol.dataproto import DataProto",
        "from streamrl.protocol.codec import decode",
        "from streamrl.protocol import tensors, DataProto",
    ]
    forget = "for name in [n for n in sys.modules if n.startswith('streamrl')]: del sys.modules[name]"
    done = run("\n".join(["import sys", *[f"{line}\n{forget}" for line in lines]]))
    assert done.returncode == 0, done.stderr


def test_checks_fire_without_asserts():
    code = "from streamrl.protocol import KVBatchMeta\ntry: KVBatchMeta('t', ['A_0_0'], [])\nexcept AssertionError: print('fired')"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "fired\n"


def test_unknown_names_of_the_package_are_attribute_errors():
    import streamrl.protocol

    with pytest.raises(AttributeError):
        _ = streamrl.protocol.Nothing
