"""What ships for other machines: the image's lock has the tested versions, manifests pass their published schemas, and
the wheel, installed, works outside the checkout, with the config files that ship.

The schemas in tests/data/schemas are pruned to what the manifests use; a key that a schema doesn't have is an error.
"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as normalized

from data_pipeline.base import paths
from launch.hosts import read

ROOT = Path(__file__).parent.parent
SCHEMAS = ROOT / "tests/data/schemas"
CUDA = re.compile(r"nvidia-|cuda-|triton$")  # torch asks for them on machines with GPUs
BUILDERS = {"setuptools", "wheel", "packaging"}


def requirements(path: str) -> list[str]:
    lines = (ROOT / path).read_text().replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def pins(path: str) -> dict[str, str]:
    """The versions of a requirements file; a requirement without exactly one version is an error."""
    found = {}
    for line in requirements(path):
        requirement = Requirement(line.partition("--hash")[0])
        (version,) = requirement.specifier
        assert version.operator == "==", line
        found[normalized(requirement.name)] = version.version
    return found


def test_every_requirement_of_the_image_is_locked_by_hashes():
    for line in [*requirements("docker/requirements.txt"), *requirements("docker/build-requirements.txt")]:
        hashes = line.split("--hash=")[1:]
        assert hashes, line
        for kind, _, digest in (word.strip().partition(":") for word in hashes):
            assert (kind, len(bytes.fromhex(digest))) == ("sha256", 32), line


def test_the_image_has_the_tested_versions_of_all_that_the_product_needs():
    tested, locked = pins("constraints.txt"), pins("docker/requirements.txt")
    assert {name for name in locked if not CUDA.match(name)} <= tested.keys() | BUILDERS
    assert {name: version for name, version in locked.items() if tested.get(name, version) != version} == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {normalized(Requirement(line).name) for line in project["dependencies"]}
    assert needed <= locked.keys()
    builders = pins("docker/build-requirements.txt")
    assert builders.keys() == BUILDERS
    assert {name: version for name, version in builders.items() if locked.get(name, version) != version} == {}


def test_the_image_copies_what_its_steps_read_and_no_step_runs_as_root_afterwards():
    lines = (ROOT / "docker/Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split() for line in lines if line.startswith(("RUN", "COPY", "USER", "WORKDIR"))]
    sources = [source for instruction, *words in steps if instruction == "COPY" for source in words[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / "docker/Dockerfile.dockerignore").read_text().splitlines()
    assert {source.split("/")[0] for source in sources} == {line[1:] for line in ignored if line.startswith("!")}
    assert steps[-2:] == [["USER", "trainer"], ["WORKDIR", "/work"]]


def manifest(path: str) -> dict:
    return yaml.safe_load((ROOT / "deploy" / path).read_text())


def test_manifests_pass_their_schemas():
    names = ("kubeflow-trainer.json", "skypilot.json")
    kubeflow, skypilot = (json.loads((SCHEMAS / name).read_text()) for name in names)
    for document in map(manifest, ("kubeflow/runtime.yaml", "kubeflow/trainjob.yaml")):
        jsonschema.validate(document, kubeflow[document["kind"]])
        with pytest.raises(jsonschema.ValidationError, match="numNode"):
            jsonschema.validate({**document, "spec": {**document["spec"], "numNode": 2}}, kubeflow[document["kind"]])
    task = manifest("skypilot/run.yaml")
    parts = {"task": task, "resources": task["resources"], "storage": task["file_mounts"]["/bucket"]}
    for part, document in parts.items():
        jsonschema.validate(document, skypilot[part])
        with pytest.raises(jsonschema.ValidationError, match="nodes"):
            jsonschema.validate({**document, "nodes": 2}, skypilot[part])


def test_the_parts_of_the_kubeflow_manifests_fit_each_other_and_the_image():
    runtime, job = manifest("kubeflow/runtime.yaml"), manifest("kubeflow/trainjob.yaml")
    policy = runtime["spec"]["mlPolicy"]["mpi"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    node, launcher = (
        entry["template"]["spec"]["template"]["spec"]["containers"][0]
        for entry in runtime["spec"]["template"]["spec"]["replicatedJobs"]
    )
    gpus = int(node["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus == policy["numProcPerNode"] == job["spec"]["trainer"]["numProcPerNode"]
    assert (node["name"], launcher["name"]) == ("node", "node")  # Trainer mounts keys into containers of this name
    sshd = (ROOT / "docker/sshd_config").read_text()
    assert f"HostKey {policy['sshAuthMountPath']}/id_rsa" in sshd
    assert f"Port {node['readinessProbe']['tcpSocket']['port']}" in sshd
    assert "sshd_config /etc/encdec-pretrain/sshd_config" in (ROOT / "docker/Dockerfile").read_text()
    assert node["args"][-1] == "/etc/encdec-pretrain/sshd_config"
    (run,) = job["spec"]["trainer"]["args"]
    assert Path(paths.config(run)).exists()


def test_skypilots_variables_become_a_hostfile(tmp_path):
    """The line of the manifest, as its shell runs it, gives what `launch hosts` reads."""
    task = manifest("skypilot/run.yaml")
    assert (ROOT / task["envs"]["RUN"]).exists()
    (line,) = [line.strip() for line in task["run"].splitlines() if "SKYPILOT_NODE_IPS" in line]
    line = line.replace("/tmp/hostfile", shlex.quote(str(tmp_path / "hostfile")))
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    subprocess.run(["bash", "-c", line], env={**nodes, "PATH": "/usr/bin:/bin"}, check=True)
    assert [(node.name, node.ranks) for node in read(tmp_path / "hostfile")] == [("10.0.0.4", 8), ("10.0.0.5", 8)]


def test_skypilots_bucket_takes_appends_and_has_one_node():
    """Of SkyPilot's modes only MOUNT_CACHED takes appends. Each node has its own cache, so nodes don't share runs."""
    task = manifest("skypilot/run.yaml")
    assert (task["file_mounts"]["/bucket"]["mode"], task["num_nodes"]) == ("MOUNT_CACHED", 1)


FOLDERS = ("data_pipeline", "pretrain", "launch", "configs")
FILES = ("pyproject.toml", "README.md", "LICENSE")
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('dist')"  # what pip calls
LOAD = """
import data_pipeline
from data_pipeline.config import CorpusConfig
from data_pipeline.base import paths
from data_pipeline.base.config_file import load
from pretrain.config import RunConfig
run, corpus = load("run.yaml", [], RunConfig), load(paths.config("configs:corpora/quickstart.yaml"), [], CorpusConfig)
print(data_pipeline.__file__, run.model.d_model, run.run.name, corpus.sources[0].path)
"""
RUN = """
extends: configs:runs/t5-v1.1-base-wikipedia.yaml  # which extends others, the last of them in another folder
run: {name: mine}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder in which the wheel has been unpacked: `pip install --target` without what it depends on."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "target"))
    for file in FILES:  # setuptools builds beside the source; the checkout stays clean
        shutil.copy(ROOT / file, source)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("dist/encdec_pretrain-*.whl")
    zipfile.ZipFile(wheel).extractall(target)
    return target


def test_the_wheel_holds_what_ships(installed):
    def files(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*.*") if "__pycache__" not in path.parts}

    for package in ("data_pipeline", "pretrain", "launch"):
        assert files(installed / package) >= files(ROOT / package), package
    assert files(installed / "data_pipeline/configs") == files(ROOT / "configs")
    (commands,) = installed.glob("*.dist-info/entry_points.txt")
    named = {line.partition(" =")[0] for line in commands.read_text().split("\n")}
    assert named >= {"data-pipeline", "pretrain", "launch"}
    assert not any((installed / folder).exists() for folder in ("tests", "examples"))


def test_an_installed_wheel_works_in_an_empty_folder(installed, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "120"}
    run = functools.partial(subprocess.run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    package = installed / "data_pipeline"
    loaded = run([sys.executable, "-c", LOAD])
    found = [package / "__init__.py", 768, "mine", package / "samples/king-james.jsonl.bz2"]
    assert loaded.stdout.split() == list(map(str, found)), loaded.stderr
    shown = run([sys.executable, "-m", "data_pipeline", "--help"])
    assert (shown.returncode, "Build the whole corpus" in shown.stdout) == (0, True), shown.stderr
