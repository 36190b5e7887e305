"""One rank of gloo's collectives. Started by `compare.py`; prints the median milliseconds of each by name."""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

REPEATS = 15


def main():
    mib = int(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    elements = (mib << 20) // 4 // world_size * world_size
    whole, received = torch.ones(elements), torch.empty(elements)
    part = torch.empty(elements // world_size)
    cases = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_to_all": lambda: dist.all_to_all_single(received, whole),
    }
    medians = {}
    for name, case in cases.items():
        seconds = []
        for repeat in range(REPEATS + 2):
            whole.fill_(1.0)
            dist.barrier()
            start = time.perf_counter()
            case()
            dist.barrier()
            if repeat >= 2:
                seconds.append(time.perf_counter() - start)
        medians[name] = statistics.median(seconds) * 1e3
    if rank == 0:
        print(json.dumps(medians), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
