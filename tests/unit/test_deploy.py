"""The files under ``deploy/``: units that systemd takes, manifests that fit, a build that has all it needs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tierkv import __version__
from tierkv.cli import cli
from tierkv.server_config import ServerConfig
from tierkv.sizes import parse_duration
from tierkv.toml_config import load
from tierkv_server.signals import CLOSE_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SYSTEMD, KUBERNETES = DEPLOY / "systemd", DEPLOY / "kubernetes"
#: Where the units and the image have the program.
PROGRAM = "/opt/tierkv/bin/tierkv"


def unit(name: str) -> dict[str, dict[str, list[str]]]:
    """Return the sections of a unit: values by option, in order."""
    sections: dict[str, dict[str, list[str]]] = {}
    for line in (SYSTEMD / name).read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            option, _, value = line.partition("=")
            section.setdefault(option, []).append(value)
    return sections


def server_config(path: Path) -> ServerConfig:
    return load(path, files=False)


def check_command(words: list[str]) -> dict[str, Any]:
    """Check that ``tierkv`` takes these words, and return what it understood."""
    context = cli.make_context("tierkv", list(words))
    command: click.Command = cli
    args = words
    while isinstance(command, click.Group):
        name, found, args = command.resolve_command(context, args)
        assert found is not None, name
        command = found
        context = command.make_context(name, list(args), parent=context)
    return context.params


# -- systemd


def test_the_units_say_what_the_configuration_says() -> None:
    service, sock = unit("tierkv.service")["Service"], unit("tierkv.socket")["Socket"]
    config = server_config(SYSTEMD / "tierkv.toml")
    assert sock["ListenStream"] == [str(config.socket)]
    assert f"/var/lib/{service['StateDirectory'][0]}" == str(config.disk_dir)
    assert int(sock["SocketMode"][0], 8) == config.listen.socket_mode
    assert service["User"] == sock["SocketUser"] and service["Group"] == sock["SocketGroup"]
    assert float(service["TimeoutStopSec"][0]) > config.drain_s + CLOSE_S
    assert "RuntimeDirectory" not in service, "its end would take the socket away"
    assert "PrivateUsers" not in service and "RemoveIPC" not in service and "ProcSubset" not in service
    assert "AF_UNIX" in service["RestrictAddressFamilies"][0]


def test_the_units_run_commands_that_exist() -> None:
    service = unit("tierkv.service")["Service"]
    commands = [shlex.split(line) for line in service["ExecStart"] + service["ExecStartPre"]]
    assert [words[0] for words in commands] == [PROGRAM] * 2
    files = [check_command(words[1:])["file"] for words in commands]
    assert set(map(str, files)) == {"/etc/tierkv/tierkv.toml"}
    assert service["ExecReload"] == ["/bin/kill -HUP $MAINPID"] and service["Type"] == ["notify"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    text = (SYSTEMD / "tierkv.service").read_text().replace(PROGRAM, sys.executable)
    (tmp_path / "tierkv.service").write_text(text)
    shutil.copy(SYSTEMD / "tierkv.socket", tmp_path)
    units = [str(tmp_path / name) for name in ("tierkv.service", "tierkv.socket")]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60)
    ours = [line for line in done.stderr.splitlines() if "tierkv" in line]  # not what it says of this system's own
    assert ours == [] and done.returncode == 0, done.stderr
    bad = tmp_path / "bad.service"
    bad.write_text(text.replace("ProtectProc=", "ProtectProcc="))
    done = subprocess.run(["systemd-analyze", "verify", str(bad)], capture_output=True, text=True, timeout=60)
    assert "ProtectProcc" in done.stderr, "a wrong option would not have been seen"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_service_is_hardened() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(SYSTEMD / "tierkv.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-300:]


# -- Kubernetes


def manifest(name: str) -> Any:
    return yaml.safe_load((KUBERNETES / name).read_text())


def laid_over(below: Any, above: Any) -> Any:
    """Return a strategic merge patch laid over a manifest: lists of named things are merged by name."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {key: laid_over(below.get(key), above.get(key)) for key in below | above}
    if isinstance(below, list) and isinstance(above, list) and _named(below) and _named(above):
        under, over = ({item["name"]: item for item in items} for items in (below, above))
        return [laid_over(under.get(name), over.get(name)) for name in under | over]
    return below if above is None else above


def _named(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(item, dict) and "name" in item for item in items)


def by_name(value: Any) -> Any:
    """Return a manifest whose lists of named things do not depend on their order."""
    if isinstance(value, dict):
        return {key: by_name(item) for key, item in value.items()}
    if isinstance(value, list):
        return {i["name"]: by_name(i) for i in value} if _named(value) else [by_name(item) for item in value]
    return value


@pytest.fixture(scope="module")
def daemonset() -> dict[str, Any]:
    """The DaemonSet that is applied: with the site's values."""
    made = laid_over(manifest("daemonset.yaml"), manifest("values.yaml"))
    assert isinstance(made, dict)
    return made


def pod(daemonset: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = daemonset["spec"]["template"]["spec"]
    return spec


def test_the_kustomization_names_files_that_are_there() -> None:
    kustomization = manifest("kustomization.yaml")
    names = [*kustomization["resources"], *(p["path"] for p in kustomization["patches"])]
    names += [name for made in kustomization["configMapGenerator"] for name in made["files"]]
    assert sorted(names) == sorted(p.name for p in KUBERNETES.iterdir() if p.name != "kustomization.yaml")
    assert manifest("namespace.yaml")["metadata"]["name"] == kustomization["namespace"]
    below, above = manifest("daemonset.yaml"), manifest("values.yaml")
    for field in ("apiVersion", "kind"):
        assert below[field] == above[field]
    assert below["metadata"]["name"] == above["metadata"]["name"]


def test_values_add_no_container_or_volume_by_mistake() -> None:
    below, above = (pod(manifest(name)) for name in ("daemonset.yaml", "values.yaml"))
    for kind in ("containers", "initContainers", "volumes"):
        assert {item["name"] for item in above[kind]} <= {item["name"] for item in below[kind]}


def test_the_daemonset_fits_the_configuration(daemonset: dict[str, Any]) -> None:
    config = server_config(KUBERNETES / "tierkv.toml")
    spec = pod(daemonset)
    container = spec["containers"][0]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts[str(config.disk_dir)]]["hostPath"]["type"] == "DirectoryOrCreate"
    assert volumes[mounts[str(config.socket.parent)]]["hostPath"]["path"] == str(config.socket.parent)
    secrets = [config.listen.reader_token_file, config.listen.admin_token_file]
    secrets += [config.shared.password_file] if config.shared else []
    assert {str(path.parent) for path in secrets if path} == {"/etc/tierkv-secrets"} and None not in secrets
    secret = volumes[mounts["/etc/tierkv-secrets"]]["secret"]
    assert secret["defaultMode"] & 0o037 == 0, "the server refuses secrets that others may read or change"
    params = check_command(container["args"])
    mounted = volumes[mounts[str(Path(params["file"]).parent)]]["configMap"]["name"]
    generator = manifest("kustomization.yaml")["configMapGenerator"][0]
    assert mounted == generator["name"] and Path(params["file"]).name in generator["files"]
    assert spec["terminationGracePeriodSeconds"] > config.drain_s + CLOSE_S


def test_the_probes_reach_the_admin_server(daemonset: dict[str, Any]) -> None:
    config = server_config(KUBERNETES / "tierkv.toml")
    container = pod(daemonset)["containers"][0]
    assert config.http is not None
    host, _, port = config.http.listen.rpartition(":")
    assert host == "0.0.0.0" and container["ports"] == [{"name": "http", "containerPort": int(port)}]
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: get["path"] for kind, get in probes.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    assert all(get["port"] == "http" for get in probes.values())


def test_the_pod_has_no_more_rights_than_it_needs(daemonset: dict[str, Any]) -> None:
    spec = pod(daemonset)
    server, first = spec["containers"][0]["securityContext"], spec["initContainers"][0]
    assert spec["automountServiceAccountToken"] is False and "hostNetwork" not in spec and "hostPID" not in spec
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] != 0
    assert server["capabilities"] == {"drop": ["ALL"]} and server["readOnlyRootFilesystem"]
    assert not server["allowPrivilegeEscalation"]
    uid = str(spec["securityContext"]["runAsUser"])
    args = first["args"]
    assert args[args.index("-o") + 1] == uid, "the directories would belong to another user"
    assert {m["mountPath"] for m in first["volumeMounts"]} == set(args[-2:])
    assert first["image"] == spec["containers"][0]["image"] == f"tierkv:{__version__}"
    limits = spec["containers"][0]["resources"]["limits"]
    assert limits["memory"].endswith("Gi") and "cpu" not in limits, "a throttled server would stall engines"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_makes_the_same(daemonset: dict[str, Any], tmp_path: Path) -> None:
    environment = os.environ | {"KUBECONFIG": os.devnull, "HOME": str(tmp_path)}  # renders files, asks no cluster
    command = ["kubectl", "kustomize", str(KUBERNETES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    made = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    config_map = made["ConfigMap"]
    assert tomllib.loads(config_map["data"]["tierkv.toml"]) == tomllib.loads((KUBERNETES / "tierkv.toml").read_text())
    expected = laid_over(daemonset, {"metadata": {"namespace": "tierkv"}})
    for volume in pod(expected)["volumes"]:
        if volume["name"] == "config":
            volume["configMap"]["name"] = config_map["metadata"]["name"]
    assert by_name(made["DaemonSet"]) == by_name(expected)


# -- the container


def containerfile() -> list[list[str]]:
    """Return the instructions, each as its words."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def copied() -> list[tuple[str, str]]:
    """Return what is copied from the tree: source and target."""
    pairs = []
    for words in containerfile():
        if words[0] == "COPY" and not words[1].startswith("--from"):
            pairs += [(source, words[-1]) for source in words[1:-1]]
    return pairs


def test_the_container_runs_a_command_that_exists() -> None:
    last = {words[0]: " ".join(words[1:]) for words in containerfile()}
    assert yaml.safe_load(last["ENTRYPOINT"]) == [PROGRAM]
    assert str(check_command(yaml.safe_load(last["CMD"]))["file"]) == "/etc/tierkv/tierkv.toml"
    assert last["USER"].split(":")[0] not in ("root", "0") and last["STOPSIGNAL"] == "SIGTERM"
    known = {"ARG", "FROM", "WORKDIR", "COPY", "ENV", "RUN", "USER", "VOLUME", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert set(last) <= known
    stages = [words for words in containerfile() if words[0] == "FROM"]
    names = {words[3] for words in stages if len(words) == 4}
    used = {words[1].removeprefix("--from=") for words in containerfile() if words[1].startswith("--from=")}
    assert used == names


def test_the_container_pins_what_it_installs() -> None:
    environment = " ".join(" ".join(words[1:]) for words in containerfile() if words[0] == "ENV")
    constraints = environment.split("PIP_CONSTRAINT=")[1].split()[0]
    assert constraints.removeprefix("/src/") in {target for _, target in copied()}


def test_what_the_container_copies_is_all_that_a_build_needs(tmp_path: Path) -> None:
    """The wheel built from exactly those files has every file of our packages."""
    tree = tmp_path / "src"
    for source, target in copied():
        path = tree / target / source if target == "./" else tree / target
        path.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, path, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / source, path)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(tree)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    wheel = next(tmp_path.glob("tierkv-*.whl"))
    there = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name and ".data/" not in name}
    wanted = set()
    for base in (ROOT, ROOT / "server", ROOT / "connector"):
        for package in base.glob("tierkv*"):
            files = (p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
            wanted |= {str(p.relative_to(base)) for p in files if ".egg-info" not in str(p)}
    assert there == wanted


def test_documents_say_the_same_durations() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    assert f"{CLOSE_S:g} s" in text and parse_duration("20s") == server_config(SYSTEMD / "tierkv.toml").drain_s
