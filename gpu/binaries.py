"""Prints the name and path of every binary in cargo's messages, for gpu/build.sh."""

import json
import sys


def name(target: dict, is_test: bool) -> str | None:
    """Returns `ulysses`, `test_kernels` and `test_ulysses` (the libraries' own tests), `test_NAME` or `bench_NAME`."""
    [kind] = target["kind"][:1]
    if kind == "bench":
        return f"bench_{target['name']}"
    if kind == "test":
        return f"test_{target['name']}"
    if kind == "bin" and not is_test:
        return target["name"]
    libraries = {"ulysses_kernels": "test_kernels", "ulysses": "test_ulysses"}
    return libraries.get(target["name"]) if kind == "lib" and is_test else None


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message.get("executable"):
            found = name(message["target"], message["profile"]["test"])
            if found:
                print(found, message["executable"])


if __name__ == "__main__":
    main()
