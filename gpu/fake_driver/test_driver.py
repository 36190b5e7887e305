#!/usr/bin/env python3
"""Seeds faults of a program and checks that the fake driver reports each one, in every order of the streams."""

import os
import re
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.path.join(HERE, "../../target/fake-driver")
ORDERS = ["late", "eager", "random:1", "random:2"]
FAULTS_FOUND = 97

FAULTS = {
    "forgotten_event": "no order between: memset .* writes, and copy to the host .* reads the same memory",
    "freed_early": "no order between: copy to the host .* reads, and free .* writes the same memory",
    "used_after_free": "memset .* after the free",
    "host_read_too_early": "the host uses page-locked memory at byte 5 before it has waited for: copy to the host",
    "host_write_too_early": "the host uses page-locked memory at byte 5 before it has waited for: copy from the host",
    "wrong_device": "on a stream of GPU 0 while the context of GPU 1 is current",
    "memory_of_another_device": "on GPU 1 writes memory of GPU 0",
    "function_of_another_device": "attention_zero of GPU 0 is launched on a stream of GPU 1",
    "event_of_another_device": "cuEventRecord of an event of GPU 0 on a stream of GPU 1",
    "past_the_end": "do not lie in an allocation",
    "write_into_the_red_zone": "something wrote next to the 10000 bytes",
    "no_context": "cuMemAllocAsync without a current context",
    "unknown_function": "cuGraphLaunch is not implemented",
}


class Faults(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory()
        cls.binary = os.path.join(cls.folder.name, "test_driver")
        library = os.path.join(FOLDER, "lib")
        source = os.path.join(HERE, "test_driver.cpp")
        subprocess.run(
            ["g++", "-std=c++17", "-Wall", "-Wextra", source, "-o", cls.binary, f"-L{library}", "-lcuda",
             f"-Wl,-rpath,{library}"],
            check=True,
        )

    @classmethod
    def tearDownClass(cls) -> None:
        cls.folder.cleanup()

    def run_program(self, name: str, order: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "FAKE_DRIVER_GPUS": "2", "FAKE_DRIVER_ORDER": order}
        if name == "injected":
            environment["FAKE_DRIVER_FAIL"] = "cuMemAllocAsync:3,cuEventRecord:2+=700"
        return subprocess.run([self.binary, name], env=environment, capture_output=True, text=True, timeout=60)

    def test_a_correct_program_has_no_report(self) -> None:
        for order in ORDERS:
            for name in ["none", "collective", "shared_memory", "injected"]:
                with self.subTest(name=name, order=order):
                    ended = self.run_program(name, order)
                    self.assertEqual((ended.returncode, ended.stderr), (0, ""))

    def test_each_fault_is_reported(self) -> None:
        for order in ORDERS:
            for name, expected in FAULTS.items():
                with self.subTest(name=name, order=order):
                    ended = self.run_program(name, order)
                    self.assertEqual(ended.returncode, FAULTS_FOUND, ended.stderr)
                    reports = ended.stderr.splitlines()
                    self.assertTrue(re.search(expected, reports[0]), ended.stderr)


if __name__ == "__main__":
    sys.exit(unittest.main())
