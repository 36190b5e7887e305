"""Parses the resources of each kernel from the output of `ptxas -v`."""

import re
from dataclasses import dataclass

# The patterns match the pinned ptxas. An unknown report is an error: it must not pass as one without spills.
ENTRY = re.compile(r"Compiling entry function '(?P<kernel>[^']+)' for '(?P<arch>sm_\d+\w*)'")
PROPERTIES = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
USED = re.compile(r"Used (?P<registers>\d+) registers")
SHARED = re.compile(r"(?P<shared>\d+) bytes smem")
# Messages of which -Werror makes no errors. C7510 to C7519: products of warpgroups that wait for each other; C7508:
# registers that are not redistributed.
SERIALIZED = re.compile(r"^.*(?:\bserialized\b|'setmaxnreg' ignored).*$", re.MULTILINE)


class UnreadableReport(Exception):
    """The output does not have the format of the pinned ptxas."""


@dataclass(frozen=True)
class Usage:
    """The resources of one kernel on one architecture; everything but `registers` is in bytes."""

    kernel: str
    arch: str
    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int

    def spills(self) -> bool:
        return self.spill_stores > 0 or self.spill_loads > 0

    def uses_local_memory(self) -> bool:
        """Returns whether the kernel uses local memory: for spilled registers, or for arrays with a dynamic index."""
        return self.stack > 0 or self.spills()


def serialized(report: str) -> list[str]:
    """Returns the messages of a report that say that products overlap with nothing, or that registers stay where they are."""
    return [line.strip() for line in SERIALIZED.findall(report)]


def parse(report: str) -> list[Usage]:
    """Parses a ptxas report: name, properties and resources of each entry function."""
    usages = []
    entries = list(ENTRY.finditer(report))
    ends = [entry.start() for entry in entries[1:]] + [len(report)]
    for entry, end in zip(entries, ends):
        usages.append(_usage(entry, report[entry.end() : end]))
    if not usages:
        raise UnreadableReport(f"ptxas reports no kernel:\n{report}")
    return usages


def _usage(entry: re.Match, block: str) -> Usage:
    # Functions that were not inlined follow the kernel, each with its own properties.
    properties = list(PROPERTIES.finditer(block))
    used = USED.search(block)
    if not properties or used is None:
        raise UnreadableReport(f"ptxas says too little of {entry['kernel']} for {entry['arch']}:\n{block}")
    shared = SHARED.search(block)
    return Usage(
        kernel=entry["kernel"],
        arch=entry["arch"],
        registers=int(used["registers"]),
        shared=int(shared["shared"]) if shared else 0,
        stack=sum(int(match["stack"]) for match in properties),
        spill_stores=sum(int(match["stores"]) for match in properties),
        spill_loads=sum(int(match["loads"]) for match in properties),
    )
