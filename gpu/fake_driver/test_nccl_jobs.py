"""Jobs of processes over the fake NCCL: they train as threads on the CPU do, and end with the documented error if a rank fails.

    ULYSSES=target/fake/release/ulysses gpu/fake-driver.sh --gpus 4 python3 gpu/fake_driver/test_nccl_jobs.py
"""

import json
import os
import socket
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

# Some tests run it in another directory.
ULYSSES = os.path.abspath(os.environ["ULYSSES"])
# Far more than a job takes on a busy machine: a hang is a failure.
LIMIT_S = 300
# In the first step.
OPERATION = 45
CONFIG = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "gradient_clipping": 1.0,
    "ulysses": {"model": "nano", "seq_len": 32, "steps": 2},
}
# What rank 1 does at that operation, and what the job then says.
FAILURES = {
    "refuse": ["rank 1", "internal error: refused (injected)"],
    "error": ["rank 1", "remote process exited or there was a network error"],
    "hang": ["not complete after", "a rank did not join, or is slower than the timeout"],
    "stall": ["not complete after", "a rank did not join, or is slower than the timeout"],
    "freeze": ["timed out", "[1]"],
    "exit": ["rank 1 was killed by signal 9 (SIGKILL)"],
}


class Jobs(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = Path(self.folder.name)
        (self.path / "text.txt").write_text("A text to train on, of some length. " * 100)

    def train(self, name, arguments, launcher=(), stage=0, check="off", **environment):
        """Trains; returns the exit code, the losses and the output."""
        config, output = self.path / "config.json", self.path / name
        ulysses = CONFIG["ulysses"] | {"comm": {"timeout_seconds": 4, "check": check}}
        config.write_text(json.dumps(CONFIG | {"zero_optimization": {"stage": stage}, "ulysses": ulysses}))
        flags = ["--data", self.path / "text.txt", "--output", output, "--threads-per-rank", "1", "--seed", "1"]
        command = [ULYSSES, *launcher, "train", config, *flags, *arguments]
        done = subprocess.run(
            [str(word) for word in command], env=os.environ | environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        metrics = output / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
        return done.returncode, losses, done.stdout + done.stderr

    def test_processes_train_as_threads_on_the_cpu_do(self):
        code, expected, output = self.train("cpu", ["--mesh", "1x2", "--backend", "thread", "--device", "cpu"])
        self.assertEqual((code, len(expected)), (0, 2), output)
        for mesh, ranks, stage, check in [("1x2", 2, 0, "on"), ("2x1", 2, 3, "off"), ("2x2", 4, 2, "off")]:
            with self.subTest(mesh=mesh):
                launcher = ["launch", "--nproc", ranks, "--"]
                code, losses, output = self.train(mesh, ["--mesh", mesh, "--backend", "nccl"], launcher, stage, check)
                self.assertEqual(code, 0, output)
                for loss, wanted in zip(losses, expected, strict=True):
                    self.assertAlmostEqual(loss, wanted, delta=2e-4)

    def test_a_slow_rank_is_waited_for(self):
        code, losses, output = self.train_with(f"1:{OPERATION}:slow=1000")
        self.assertEqual((code, len(losses)), (0, 2), output)

    def test_a_failed_rank_ends_the_job_with_the_documented_error(self):
        for kind, said in FAILURES.items():
            with self.subTest(kind=kind):
                code, _, output = self.train_with(f"1:{OPERATION}:{kind}")
                self.assertEqual(code, 1, output)
                for words in said:
                    self.assertIn(words, output)

    def test_processes_on_one_gpu_are_refused_with_the_remedy(self):
        launcher, arguments = ["launch", "--nproc", "2", "--"], ["--mesh", "1x2", "--backend", "nccl"]
        code, _, output = self.train("shared", arguments, launcher, FAKE_DRIVER_GPUS="1")
        self.assertEqual(code, 1, output)
        self.assertIn("ranks 0 and 1 are on the same GPU; NCCL 2.30 allows one rank per GPU", output)
        code, losses, output = self.train(
            "allowed", arguments, launcher, FAKE_DRIVER_GPUS="1", NCCL_MULTI_RANK_GPU_ENABLE="1"
        )
        self.assertEqual((code, len(losses)), (0, 2), output)

    def test_launchers_of_three_nodes_continue_without_a_killed_one(self):
        """The nodes share GPUs, since all are this machine."""
        steps = 14
        ulysses = CONFIG["ulysses"] | {"data": "text.txt", "seq_len": 16, "steps": steps}
        batch = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 1, "checkpoint": {"interval": 2}}
        (self.path / "config.json").write_text(json.dumps(CONFIG | batch | {"ulysses": ulysses}))
        train = ["train", "config.json", "--mesh", "3x2", "--threads-per-rank", "1"]
        subprocess.run(
            [ULYSSES, *train, "--backend", "thread", "--device", "cpu", "--output", "whole"],
            cwd=self.path, check=True, capture_output=True, timeout=LIMIT_S,
        )  # fmt: skip
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        allowed = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "ULYSSES_JOB_SECRET": "0123456789abcdef"}
        flags = ["--nproc", "2", "--grace", "3", "--max-restarts", "1", "--min-nodes", "2"]
        launchers = [
            subprocess.Popen(
                [ULYSSES, "launch", "--nnodes", "3", "--node-rank", str(node), "--rdzv-endpoint", endpoint, *flags, "--"]
                + [*train, "--backend", "nccl", "--output", "out"],
                cwd=self.path, env=os.environ | allowed, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            for node in range(3)
        ]
        metrics, deadline = self.path / "out" / "metrics.jsonl", time.monotonic() + LIMIT_S
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 5):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        launchers[2].kill()
        said = [launcher.communicate(timeout=LIMIT_S)[1] for launcher in launchers]
        for node in range(2):
            self.assertEqual(launchers[node].returncode, 0, said)
            self.assertIn("restart 1 of 1 on 2 node(s) with mesh 2x2", said[node])
        whole, both = (
            [json.loads(line) for line in (self.path / name / "metrics.jsonl").read_text().splitlines()]
            for name in ("whole", "out")
        )
        restarts, continued = ([line for line in both if ("restart" in line) == is_restart] for is_restart in (True, False))
        self.assertEqual([(line["restart"], line["dp_size_before"], line["dp_size"]) for line in restarts], [(1, 3, 2)])
        self.assertEqual([(step["dp_size"], step["sp_size"]) for step in (continued[0], continued[-1])], [(3, 2), (2, 2)])
        for step, wanted in zip(continued, whole, strict=True):
            self.assertAlmostEqual(step["loss"], wanted["loss"], delta=2e-4)

    def test_nccl_itself_connects_the_processes_if_it_is_told_where(self):
        launcher, arguments = ["launch", "--nproc", "2", "--"], ["--mesh", "1x2", "--backend", "nccl"]
        address = {"NCCL_COMM_ID": "127.0.0.1:29876"}
        code, losses, output = self.train("comm-id", arguments, launcher, **address)
        self.assertEqual((code, len(losses)), (0, 2), output)
        code, _, output = self.train("comm-id-failed", arguments, launcher, FAKE_NCCL_FAULT=f"1:{OPERATION}:error", **address)
        self.assertEqual(code, 1, output)
        self.assertIn("remote process exited or there was a network error", output)

    def train_with(self, fault):
        launcher, name = ["launch", "--nproc", "4", "--grace", "1", "--"], fault.replace(":", "-")
        return self.train(name, ["--mesh", "2x2", "--backend", "nccl"], launcher, FAKE_NCCL_FAULT=fault)


if __name__ == "__main__":
    unittest.main()
