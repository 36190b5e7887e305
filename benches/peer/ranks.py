"""Processes that are the ranks of a job on this machine, joined by gloo."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path


def run_ranks(script, arguments, world_size, threads, preload=None):
    """Runs `script` once per rank and returns the JSON object that rank 0 prints last."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore",
        # DeepSpeed looks for `ninja` there.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    if preload:
        environment["LD_PRELOAD"] = preload
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    ranks = []
    for rank in range(world_size):
        of_rank = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(command, env=of_rank, stdout=pipe, stderr=subprocess.PIPE, text=True))
    outputs = [rank.communicate() for rank in ranks]
    failed = [errors for rank, (_, errors) in zip(ranks, outputs) if rank.returncode != 0]
    if failed:
        raise SystemExit(f"{' '.join(command)} failed:\n{failed[0]}")
    return json.loads(outputs[0][0].strip().splitlines()[-1])
