# Prints as JSON where this Python would import vllm from, without importing it.
import sys

# `python -c` looks into the working folder first, the command `vllm` does not. Nor must this find its modules there.
if sys.path[:1] == [""]:
    del sys.path[0]

import importlib.util
import json
import os


def copies():
    for folder in [*sys.path, os.getcwd()]:
        if os.path.isfile(os.path.join(folder, "vllm", "__init__.py")):
            yield os.path.join(os.path.abspath(folder), "vllm")


def find():
    found = {"python": sys.executable, "dir": "", "others": [], "error": ""}
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError) as e:
        return {**found, "error": f"cannot look for vllm: {e}"}
    if spec is None:
        return {**found, "error": "has no vllm installed"}
    if not spec.origin or os.path.basename(spec.origin) != "__init__.py":
        where = ", ".join(spec.submodule_search_locations or [spec.origin or "nowhere"])
        return {**found, "error": f"would not import vLLM but a folder or file that happens to be called so: {where}"}
    if not os.path.isfile(spec.origin):
        return {**found, "error": f"would import vllm from {spec.origin}, which is no file that can be edited"}
    found["dir"] = os.path.dirname(os.path.abspath(spec.origin))
    for other in copies():
        if not os.path.samefile(other, found["dir"]) and other not in found["others"]:
            found["others"].append(other)
    return found


print(json.dumps(find()))
