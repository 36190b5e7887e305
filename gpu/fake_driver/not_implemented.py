"""Writes C functions for everything that cudarc binds and a fake library does not implement; each ends in a report.

    not_implemented.py CUDARC_MODULE OBJECT... >FILE.c
"""

import re
import subprocess
import sys


def bound(module: str) -> set[str]:
    with open(f"{module}/sys/mod.rs", encoding="utf-8") as file:
        return set(re.findall(r"^ +(?:pub )?fn ([A-Za-z0-9_]+)\(", file.read(), re.MULTILINE))


def implemented(objects: list[str]) -> set[str]:
    if not objects:
        return set()
    listing = subprocess.run(["nm", "--defined-only", *objects], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in listing.splitlines() if " T " in line}


def main() -> None:
    module, *objects = sys.argv[1:]
    print("int fake_driver_not_implemented(const char *);")
    for name in sorted(bound(module) - implemented(objects)):
        print(f'__attribute__((visibility("default"))) int {name}(void) {{ return fake_driver_not_implemented("{name}"); }}')


if __name__ == "__main__":
    main()
