"""Loads the native module of an installed wheel, without torch, and prints the kernels that run here.

python tools/try_wheel.py
"""

import importlib.metadata
import importlib.util
import sys

files = importlib.metadata.files("tiermoe") or []
built = [file for file in files if file.name.startswith("_native.") and file.suffix in (".so", ".pyd")]
if len(built) != 1:
    sys.exit(f"the wheel has {len(built)} native modules, not one: it was built without a compiler")
spec = importlib.util.spec_from_file_location("_native", built[0].locate())
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(*module.instruction_sets())
