"""Holds the manifests of configs/clusters against the schemas of Kubernetes and of Kubeflow's operators.

    manifests.py MPIJOBS_CRD PYTORCHJOBS_CRD

The CRDs are files of the operators' repositories, where their releases are tags:
kubeflow/mpi-operator, manifests/base/kubeflow.org_mpijobs.yaml, and
kubeflow/training-operator (1.9 and before), manifests/base/crds/kubeflow.org_pytorchjobs.yaml.
Needs kubernetes-validate, jsonschema and PyYAML: `just manifests` installs them.
"""

import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

MANIFESTS = Path(__file__).resolve().parents[2] / "configs/clusters"
KUBERNETES = "1.31"


def closed(schema):
    """The schema with no room for unknown keys, which a server would drop without a word."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    schema = {key: closed(part) for key, part in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and not is_open:
        schema["additionalProperties"] = False
    return schema


def schema_of(job, crd):
    group, version = job["apiVersion"].split("/")
    assert (crd["spec"]["group"], crd["spec"]["names"]["kind"]) == (group, job["kind"]), "the CRD of another kind"
    [schema] = [found["schema"] for found in crd["spec"]["versions"] if found["name"] == version]
    schema = closed(schema["openAPIV3Schema"])
    # The server's, not the CRD's.
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def faults(job, crd):
    for error in jsonschema.Draft7Validator(schema_of(job, crd)).iter_errors(job):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
    [replicas] = [spec for key, spec in job["spec"].items() if key.endswith("ReplicaSpecs")]
    for name, replica in replicas.items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name.lower()}, **replica["template"]}
        try:
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"pod of {name}: {'.'.join(map(str, error.path))}: {error.message}"


def main(mpijobs_crd, pytorchjobs_crd):
    found = []
    for name, crd in [("mpijob.yaml", mpijobs_crd), ("pytorchjob.yaml", pytorchjobs_crd)]:
        job = yaml.safe_load((MANIFESTS / name).read_text())
        found += [f"{name}: {fault}" for fault in faults(job, yaml.safe_load(Path(crd).read_text()))]
    print("\n".join(found) or "the manifests are valid")
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
