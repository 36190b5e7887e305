"""Tests the fake NCCL: right programs give right results, wrong ones are reported. Needs gpu/fake-driver.sh's libraries."""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = HERE.parent.parent / "target/fake-driver/lib"
REPORTED = {
    "out_of_order": r"but rank \d called nccl",
    "other_count": r"\(5 elements.*but rank|but rank \d called ncclAllReduce\(5",
    "other_message": "receives 5 elements of type 7",
    "two_orders": "in different orders, which can deadlock",
    "message_order": "in different orders, which can deadlock",
    "outside": "outside of any allocation of GPU",
    "other_gpu": "outside of any allocation of GPU 1",
    "other_stream": "on a stream of GPU 0, but the communicator's is 1",
    "overlap": "the buffers of ncclAllReduce",
    "race": "no order between: ncclAllReduce",
    "busy": "is used before its last call is over",
    "after_end": "after its end",
    "not_finalized": "is destroyed before it is finalized",
    "group_end": "ncclGroupEnd without ncclGroupStart",
    "group_open": "a thread ended within a group of calls",
    "load": "a module is loaded while ncclAllReduce",
    "pool": "accesses the memory pool of GPU",
    "config": "do not fit together",
}
# The version that has the fault, if not all have it.
VERSIONS = {"pool": {"FAKE_NCCL_VERSION": "2.22.3"}}


class FakeNccl(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.program = os.path.join(cls.folder.name, "test_nccl")
        flags = ["-std=c++17", "-g1", "-O1", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]
        libraries = [f"-L{LIBRARIES}", "-lcuda", "-lnccl", "-lpthread"]
        subprocess.run(["g++", *flags, HERE / "test_nccl.cpp", "-o", cls.program, *libraries], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_case(self, name, **environment):
        folder = tempfile.mkdtemp(dir=self.folder.name)
        variables = {"LD_LIBRARY_PATH": str(LIBRARIES), "FAKE_DRIVER_GPUS": "3", "FAKE_NCCL_FOLDER": folder}
        done = subprocess.run(
            [self.program, name], env=os.environ | variables | environment, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stderr, os.listdir(folder)

    def test_right_programs_give_right_results_and_leave_nothing(self):
        for name in ["right", "processes"]:
            for order in ["late", "eager", "random:7"]:
                for version in ["2.30.4", "2.20.5"]:
                    with self.subTest(name=name, order=order, version=version):
                        found = self.run_case(name, FAKE_DRIVER_ORDER=order, FAKE_NCCL_VERSION=version)
                        self.assertEqual(found, (0, "", []))

    def test_every_wrong_use_is_reported(self):
        for name, reported in REPORTED.items():
            with self.subTest(name=name):
                code, errors, _ = self.run_case(name, **VERSIONS.get(name, {}))
                self.assertRegex(errors, reported)
                self.assertEqual(code, 97)


if __name__ == "__main__":
    unittest.main()
