"""The chart through the real Helm library: it lints, its parts agree, bad values are refused."""

import argparse
import copy
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import msgspec
import pytest
import yaml

from cartridge_engine_ext.agent import AgentOptions, check_options
from cartridge_engine_ext.commands import AgentCommand, agent_options
from cartridge_proto.names import (
    ENV_REDIS_PASSWORD,
    ENV_REDIS_PASSWORD_FILE,
    ENV_REDIS_USERNAME,
    REDIS_USER_GATEWAY,
    redis_user_of_engine,
)
from cartridge_router.settings import Settings, load_settings

CHART = Path(__file__).resolve().parents[2] / "helm" / "cartridge-router"
CI_FILES = sorted((CHART / "ci").glob("*-values.yaml"))
RELEASE = "demo"
LINT_WARNING = 2
WORKLOADS = ("DaemonSet", "Deployment", "StatefulSet")

Manifest = dict[str, Any]


def values_of(path: Path) -> dict[str, Any]:
    """Values of one file in `ci/`."""
    return dict(yaml.safe_load(path.read_text()))


def minimal(**changes: Any) -> dict[str, Any]:
    """The least values, with dotted keys (`__` for the dot) set to something else."""
    values = copy.deepcopy(values_of(CHART / "ci" / "minimal-values.yaml"))
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        place = values
        for key in path:
            place = place.setdefault(key, {})
        place[last] = value
    return values


def render(values: dict[str, Any], *, release: str = RELEASE) -> list[Manifest]:
    """All Kubernetes objects that the chart makes."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name=release, namespace="prod")
    return [
        document
        for path, text in files.items()
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document is not None
    ]


def notes(values: dict[str, Any]) -> str:
    """What the chart says when it is installed."""
    with helm.Chart.load(CHART) as chart:
        return str(chart.render(values, name=RELEASE)["cartridge-router/templates/NOTES.txt"])


def only(objects: list[Manifest], kind: str, name_end: str = "") -> Manifest:
    """The one object of a kind whose name ends so."""
    found = [
        item
        for item in objects
        if item["kind"] == kind and item["metadata"]["name"].endswith(name_end)
    ]
    assert len(found) == 1, [item["metadata"]["name"] for item in found]
    return found[0]


def container_of(workload: Manifest) -> Manifest:
    """The only container of a workload."""
    containers: list[Manifest] = workload["spec"]["template"]["spec"]["containers"]
    assert len(containers) == 1
    return containers[0]


def env_of(workload: Manifest) -> dict[str, Manifest]:
    """Environment entries by name, each name once."""
    entries = container_of(workload)["env"]
    names = [entry["name"] for entry in entries]
    assert len(set(names)) == len(names)
    return {entry["name"]: entry for entry in entries}


def transfer_config(objects: list[Manifest]) -> Manifest:
    """The parsed `--kv-transfer-config` of the engines."""
    args = container_of(only(objects, "StatefulSet"))["args"]
    parsed: Manifest = json.loads(args[args.index("--kv-transfer-config") + 1])
    return parsed


def workloads(objects: list[Manifest]) -> list[Manifest]:
    """Everything that runs pods."""
    return [item for item in objects if item["kind"] in WORKLOADS]


@pytest.fixture(params=CI_FILES, ids=lambda path: path.stem)
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Values of each file in `ci/`."""
    return values_of(request.param)


@pytest.fixture
def objects(values: dict[str, Any]) -> list[Manifest]:
    """What those values render to."""
    return render(values)


def test_there_are_values_to_try() -> None:
    """The example files are there."""
    assert {path.stem for path in CI_FILES} == {
        "agent-values",
        "default-values",
        "discovery-values",
        "gpu-engine-values",
        "minimal-values",
        "network-policy-values",
        "store-url-values",
    }


def test_it_lints(values: dict[str, Any]) -> None:
    """Strict lint finds no warning and no error."""
    report = helm.lint(CHART, values, strict=True)
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] >= LINT_WARNING] == []


def test_every_object_is_one_that_kubernetes_knows(objects: list[Manifest]) -> None:
    """Each object has a kind of a known API version, a legal name and the release's labels."""
    versions = {
        "ConfigMap": "v1",
        "DaemonSet": "apps/v1",
        "Deployment": "apps/v1",
        "NetworkPolicy": "networking.k8s.io/v1",
        "PodDisruptionBudget": "policy/v1",
        "Role": "rbac.authorization.k8s.io/v1",
        "RoleBinding": "rbac.authorization.k8s.io/v1",
        "Service": "v1",
        "ServiceAccount": "v1",
        "StatefulSet": "apps/v1",
    }
    for item in objects:
        assert item["apiVersion"] == versions[item["kind"]]
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", item["metadata"]["name"])
        assert item["metadata"]["labels"]["app.kubernetes.io/instance"] == RELEASE
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", CI_FILES, ids=lambda path: path.stem)
def test_the_gateway_knows_every_engine_by_its_pod_name(case: Path) -> None:
    """`CARTRIDGE_ROUTER_REPLICAS` lists each pod of the StatefulSet at its headless name."""
    values = values_of(case)
    values["router"] = {**values.get("router", {}), "discovery": "static"}
    objects = render(values)
    engines = only(objects, "StatefulSet")
    service = only(objects, "Service", "-engine-headless")
    name, count = engines["metadata"]["name"], engines["spec"]["replicas"]
    assert engines["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert {"name": "http", "port": 8001, "targetPort": "http"} in service["spec"]["ports"]
    listed = env_of(only(objects, "Deployment"))["CARTRIDGE_ROUTER_REPLICAS"]["value"]
    assert listed.split(",") == [
        f"{name}-{index}=http://{name}-{index}.{service['metadata']['name']}:8001"
        for index in range(count)
    ]
    assert transfer_config(objects)["kv_connector_extra_config"]["replica_id"] == "$(POD_NAME)"
    pod_name = env_of(engines)["POD_NAME"]
    assert pod_name["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"


def test_the_gateway_may_ask_kubernetes_who_is_ready() -> None:
    """With the settings that its code reads, the pod's token, and the right to do just that."""
    objects = render(values_of(CHART / "ci" / "discovery-values.yaml"))
    gateway, service = only(objects, "Deployment"), only(objects, "Service", "-engine-headless")
    env = env_of(gateway)
    assert "CARTRIDGE_ROUTER_REPLICAS" not in env
    environment = {name: entry["value"] for name, entry in env.items() if "FLEET__" in name}
    asked = load_settings(None, environment, {}).fleet.kubernetes
    assert (asked.service, asked.namespace) == (service["metadata"]["name"], "prod")
    assert asked.port_name in {port["name"] for port in service["spec"]["ports"]}
    assert asked.kubeconfig is None
    role, binding = only(objects, "Role"), only(objects, "RoleBinding")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        }
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    account = gateway["spec"]["template"]["spec"]["serviceAccountName"]
    assert [(s["name"], s["namespace"]) for s in binding["subjects"]] == [(account, "prod")]


def test_services_and_budgets_select_the_pods_they_mean(objects: list[Manifest]) -> None:
    """Selectors are the labels of exactly one workload's pods."""
    for kind, end, workload_kind in (
        ("Service", "-cartridge-router", "Deployment"),
        ("Service", "-engine-headless", "StatefulSet"),
    ):
        selector = only(objects, kind, end)["spec"]["selector"]
        workload = only(objects, workload_kind)["spec"]
        assert workload["selector"]["matchLabels"] == selector
        assert selector.items() <= workload["template"]["metadata"]["labels"].items()
    for budget in (item for item in objects if item["kind"] == "PodDisruptionBudget"):
        is_engine = budget["metadata"]["name"].endswith("-engine")
        workload = only(objects, "StatefulSet" if is_engine else "Deployment")
        assert budget["spec"]["selector"] == workload["spec"]["selector"]


def test_engines_fail_closed(objects: list[Manifest]) -> None:
    """The connector's JSON parses, names our class and refuses to recompute virtual positions."""
    config = transfer_config(objects)
    assert config["kv_load_failure_policy"] == "fail"
    assert config["kv_connector"] == "CartridgeConnector"
    assert config["kv_connector_module_path"] == "cartridge_engine_ext.connector"
    assert config["kv_role"] == "kv_both"
    extra = config["kv_connector_extra_config"]
    assert extra["store"] in {"/store", "s3://cartridges/team?region=eu-central-1"}
    assert extra["self_url"] == "http://127.0.0.1:8001"


def test_variables_in_the_connector_s_json_are_defined(objects: list[Manifest]) -> None:
    """Every `$(NAME)` that Kubernetes must fill in is in the container's environment."""
    engines = only(objects, "StatefulSet")
    used = set(re.findall(r"\$\((\w+)\)", " ".join(container_of(engines)["args"])))
    assert used == {"CARTRIDGE_ROUTER_REDIS_URL", "POD_IP", "POD_NAME"}
    assert used <= set(env_of(engines))


@pytest.mark.parametrize("template", ["", "/model/chat.jinja"])
def test_the_chat_template_is_passed_when_it_is_named(template: str) -> None:
    """`engine.chatTemplate` becomes vLLM's flag, and nothing when empty."""
    args = container_of(only(render(minimal(engine__chatTemplate=template)), "StatefulSet"))["args"]
    assert ("--chat-template" in args) == bool(template)
    if template:
        assert args[args.index("--chat-template") + 1] == template


def test_the_control_port_is_one_number_everywhere(objects: list[Manifest]) -> None:
    """Probe, container, Service and connector agree on the control port."""
    container = container_of(only(objects, "StatefulSet"))
    port = container["readinessProbe"]["grpc"]["port"]
    extra = transfer_config(objects)["kv_connector_extra_config"]
    assert extra["control_address"] == f"$(POD_IP):{port}"
    assert {"name": "control", "containerPort": port} in container["ports"]
    ports = only(objects, "Service", "-engine-headless")["spec"]["ports"]
    assert port in {entry["port"] for entry in ports if entry["name"] == "control"}


def test_the_gateway_s_command_and_probes_are_its_contract(objects: list[Manifest]) -> None:
    """The gateway is started and probed as the command line promises."""
    container = container_of(only(objects, "Deployment"))
    assert [*container["command"], *container["args"]] == [
        "cartridge-router",
        "serve",
        *("--host", "0.0.0.0", "--port", "8000"),
        *("--config", "/etc/cartridge-router/config.yaml"),
    ]
    assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    assert {"name": "http", "containerPort": 8000} in container["ports"]


def test_pods_run_without_privileges(objects: list[Manifest]) -> None:
    """Non-root, read-only root, no capability, no token but to ask for engines, a `/tmp`."""
    for workload in workloads(objects):
        pod = workload["spec"]["template"]["spec"]
        container = container_of(workload)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        env = {entry["name"] for entry in container["env"]} if "env" in container else set()
        asks_kubernetes = "CARTRIDGE_ROUTER_FLEET__KUBERNETES__SERVICE" in env
        assert pod["automountServiceAccountToken"] is asks_kubernetes
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert "emptyDir" in volumes["tmp"]
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert mounts["/tmp"]["name"] == "tmp"  # noqa: S108 - a path in the container
        if "store" in volumes:
            assert mounts["/store"] == {"name": "store", "mountPath": "/store", "readOnly": True}
        assert {mount["name"] for mount in mounts.values()} == set(volumes)


def test_a_store_by_url_is_the_same_for_gateway_and_engines() -> None:
    """No volume is mounted, the account comes from the Secret, and the nvme folder is bounded."""
    objects = render(values_of(CHART / "ci" / "store-url-values.yaml"))
    gateway, engines = only(objects, "Deployment"), only(objects, "StatefulSet")
    for workload in (gateway, engines):
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "cartridge-store"}}]
        assert "/store" not in {mount["mountPath"] for mount in container["volumeMounts"]}
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    url = "s3://cartridges/team?region=eu-central-1"
    assert {"name": "CARTRIDGE_ROUTER_STORE", "value": url} in container["env"]
    (container,) = engines["spec"]["template"]["spec"]["containers"]
    arguments = container["args"]
    config = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    extra = config["kv_connector_extra_config"]
    assert (extra["store"], extra["nvme_dir"], extra["nvme_bytes"]) == (url, "/nvme", 32 << 30)
    assert {"name": "nvme", "mountPath": "/nvme"} in container["volumeMounts"]


def agent_objects(**changes: Any) -> list[Manifest]:
    """What the values with a node agent render to."""
    values = values_of(CHART / "ci" / "agent-values.yaml")
    values["agent"] |= changes
    return render(values)


def test_without_being_asked_there_is_no_agent() -> None:
    """And engines know of none."""
    objects = render(minimal())
    assert "DaemonSet" not in {item["kind"] for item in objects}
    assert "agent_socket" not in transfer_config(objects)["kv_connector_extra_config"]


def test_agent_and_engines_meet_at_one_socket() -> None:
    """In a folder of the node that must be there, where only the agent may write."""
    objects = agent_objects(socketFolder="/var/lib/sockets")
    agent, engines = only(objects, "DaemonSet"), only(objects, "StatefulSet")
    folder = {"hostPath": {"path": "/var/lib/sockets", "type": "Directory"}, "name": "agent"}
    mounts = {}
    for workload in (agent, engines):
        assert folder in workload["spec"]["template"]["spec"]["volumes"]
        (mount,) = [
            mount for mount in container_of(workload)["volumeMounts"] if mount["name"] == "agent"
        ]
        mounts[workload["kind"]] = mount
    assert mounts["StatefulSet"] == {**mounts["DaemonSet"], "readOnly": True}
    socket = transfer_config(objects)["kv_connector_extra_config"]["agent_socket"]
    assert socket.startswith(f"unix:{mounts['DaemonSet']['mountPath']}/")
    assert options_of(agent).listen == socket
    # The agent lets its own user in.
    pods = [workload["spec"]["template"]["spec"] for workload in (agent, engines)]
    assert pods[0]["securityContext"] == pods[1]["securityContext"]


def options_of(agent: Manifest) -> AgentOptions:
    """What the agent's command makes of its arguments."""
    container = container_of(agent)
    assert container["command"] == ["cartridge-router", "agent"]
    parser = argparse.ArgumentParser()
    AgentCommand().configure(parser)
    options = agent_options(parser.parse_args(container["args"]))
    check_options(options)
    return options


def test_the_agent_s_arguments_are_its_command_s() -> None:
    """The command takes them, and what it listens at is what is probed."""
    agent = only(agent_objects(evictionPolicy="gdsf", metricsPort=9000), "DaemonSet")
    options, container = options_of(agent), container_of(agent)
    assert (options.store, options.dram_bytes) == ("/store", 64 << 30)
    assert (str(options.nvme_dir), options.nvme_bytes) == ("/nvme", 32 << 30)
    assert options.eviction_policy == "gdsf"
    assert (options.metrics_host, options.metrics_port) == ("0.0.0.0", 9000)
    assert container["ports"] == [{"name": "metrics", "containerPort": 9000}]
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/metrics", "port": "metrics"}


def test_the_agent_pays_for_what_it_keeps() -> None:
    """Its memory is requested and allowed: the bound of artifacts, and the process beside it."""
    agent = only(agent_objects(dramBytes=64 << 30, overheadBytes=1 << 30), "DaemonSet")
    resources = container_of(agent)["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == str(65 << 30)


def test_agents_run_where_engines_may() -> None:
    """On the same nodes; what engines want of one another is not for agents."""
    objects = agent_objects()
    agent, engines = (
        only(objects, kind)["spec"]["template"]["spec"] for kind in ("DaemonSet", "StatefulSet")
    )
    for key in ("nodeSelector", "tolerations"):
        assert agent[key] == engines[key]
    assert "affinity" in engines
    assert "affinity" not in agent
    assert container_of(only(objects, "DaemonSet"))["image"] == engines["containers"][0]["image"]


def test_service_accounts_exist(objects: list[Manifest]) -> None:
    """Each workload runs as an account that the chart makes."""
    made = {item["metadata"]["name"] for item in objects if item["kind"] == "ServiceAccount"}
    used = [
        workload["spec"]["template"]["spec"]["serviceAccountName"]
        for workload in workloads(objects)
    ]
    assert set(used) == made
    assert len(set(used)) == len(used) >= 2


def test_images_are_pinned(objects: list[Manifest]) -> None:
    """No image floats: each has a digest, or a tag other than `latest`."""
    for workload in workloads(objects):
        image = container_of(workload)["image"]
        assert re.fullmatch(r"[^@]+@sha256:[0-9a-f]{64}|.+:[A-Za-z0-9_.-]+", image)
        assert not image.endswith(":latest")


def test_an_image_s_tag_is_the_app_version_by_default() -> None:
    """Without a tag the chart's appVersion is used."""
    app_version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    objects = render(minimal())
    for kind in ("Deployment", "StatefulSet"):
        assert container_of(only(objects, kind))["image"].endswith(f":{app_version}")


def test_settings_are_copied_verbatim_and_a_change_restarts_the_gateway() -> None:
    """The ConfigMap holds `router.config`, and the pod's checksum follows it."""
    config = {
        "placement": {"policy": "round_robin", "prefill_base_s": 2.5},
        "tenants": {"keys_file": "a: b # c\n"},
    }
    checksums = []
    for changed in (config, {**config, "tenants": {"keys_file": "other"}}):
        objects = render(minimal(router__config=changed))
        config_map = only(objects, "ConfigMap")
        assert yaml.safe_load(config_map["data"]["config.yaml"]) == changed
        pod = only(objects, "Deployment")["spec"]["template"]
        assert pod["spec"]["volumes"][0]["configMap"]["name"] == config_map["metadata"]["name"]
        checksums.append(pod["metadata"]["annotations"]["checksum/config"])
    assert all(len(bytes.fromhex(text)) == hashlib.sha256().digest_size for text in checksums)
    assert len(set(checksums)) == 2


def test_kubernetes_sets_no_settings() -> None:
    """No pod gets the service variables that are spelled like the gateway's settings."""
    for kind in ("Deployment", "StatefulSet"):
        pod = only(render(minimal()), kind)["spec"]["template"]["spec"]
        assert pod["enableServiceLinks"] is False


def test_the_gateway_may_end_in_its_own_time() -> None:
    """Kubernetes waits for longer than a drain takes by default."""
    pod = only(render(minimal()), "Deployment")["spec"]["template"]["spec"]
    drain = Settings().drain
    assert pod["terminationGracePeriodSeconds"] > drain.settle_s + drain.grace_s


@pytest.mark.parametrize("case", CI_FILES, ids=lambda path: path.stem)
def test_settings_of_every_case_are_settings_of_the_gateway(case: Path, tmp_path: Path) -> None:
    """The gateway itself accepts the settings of each shipped example."""
    config = values_of(case).get("router", {}).get("config", {})
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    loaded = msgspec.to_builtins(load_settings(file, {}, {}))
    for section, values in config.items():
        assert values.items() <= loaded[section].items()


def test_secrets_are_referred_to_never_copied() -> None:
    """The residency key comes from a Secret on both sides, and so can the Redis URL."""
    objects = render(values_of(CHART / "ci" / "default-values.yaml"))
    for kind in ("Deployment", "StatefulSet"):
        env = env_of(only(objects, kind))
        assert env["CARTRIDGE_ROUTER_RESIDENCY_KEY"]["valueFrom"]["secretKeyRef"] == {
            "name": "cartridge-residency",
            "key": "residency-key",
        }
        assert env["CARTRIDGE_ROUTER_REDIS_URL"]["valueFrom"]["secretKeyRef"] == {
            "name": "redis-url",
            "key": "url",
        }


def test_each_role_logs_in_to_redis_as_itself() -> None:
    """The gateway by its key of the Secret; an engine by its pod's, which is all that it sees."""
    objects = render(values_of(CHART / "ci" / "default-values.yaml"))
    gateway, engines = only(objects, "Deployment"), only(objects, "StatefulSet")
    env = env_of(gateway)
    assert env[ENV_REDIS_USERNAME]["value"] == REDIS_USER_GATEWAY
    reference = env[ENV_REDIS_PASSWORD]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": "redis-passwords", "key": "gateway"}
    env = env_of(engines)
    assert env[ENV_REDIS_USERNAME]["value"] == redis_user_of_engine("$(POD_NAME)")
    mounts = container_of(engines)["volumeMounts"]
    (mount,) = [mount for mount in mounts if mount["name"] == "redis-passwords"]
    assert mount["mountPath"] == env[ENV_REDIS_PASSWORD_FILE]["value"]
    assert (mount["subPathExpr"], mount["readOnly"]) == ("$(POD_NAME)", True)
    # Kubernetes fills in only what stands before.
    names = list(env)
    assert names.index("POD_NAME") < names.index(ENV_REDIS_USERNAME)
    for workload in (only(render(minimal()), "Deployment"), only(render(minimal()), "StatefulSet")):
        assert ENV_REDIS_USERNAME not in env_of(workload)


def test_the_gateway_reads_keys_from_a_secret() -> None:
    """Mounted as a folder, so that a changed Secret is seen; without one there is nothing."""
    gateway = only(render(minimal(router__keysSecret="api-keys")), "Deployment")
    variable = env_of(gateway)["CARTRIDGE_ROUTER_TENANTS__KEYS_FILE"]
    settings = load_settings(None, {variable["name"]: variable["value"]}, {})
    assert settings.tenants.keys_file == "/etc/cartridge-keys/keys.yaml"
    (mount,) = [m for m in container_of(gateway)["volumeMounts"] if m["name"] == "keys"]
    assert mount == {"name": "keys", "mountPath": "/etc/cartridge-keys", "readOnly": True}
    volumes = gateway["spec"]["template"]["spec"]["volumes"]
    assert {"name": "keys", "secret": {"secretName": "api-keys"}} in volumes
    plain = only(render(minimal()), "Deployment")
    assert "CARTRIDGE_ROUTER_TENANTS__KEYS_FILE" not in env_of(plain)
    assert "keys" not in [v["name"] for v in plain["spec"]["template"]["spec"]["volumes"]]


def test_engines_have_a_control_token() -> None:
    """From the named Secret, for engines only; without one the chart says what it needs."""
    objects = render(minimal())
    reference = env_of(only(objects, "StatefulSet"))["CARTRIDGE_ROUTER_CONTROL_TOKEN"]
    assert reference["valueFrom"]["secretKeyRef"] == {
        "name": "cartridge-control",
        "key": "control-token",
    }
    assert "CARTRIDGE_ROUTER_CONTROL_TOKEN" not in env_of(only(objects, "Deployment"))
    with pytest.raises(helm.HelmError, match=r"engine\.control\.tokenSecret\.secretName"):
        render(minimal(engine__control__tokenSecret__secretName=""))


def test_without_a_key_there_is_no_variable_and_a_warning() -> None:
    """Unsigned residency is said in the notes, not hidden."""
    assert "CARTRIDGE_ROUTER_RESIDENCY_KEY" not in env_of(only(render(minimal()), "Deployment"))
    assert "WARNING: residencyKey.secretName is empty" in notes(minimal())


def test_engines_elsewhere_need_no_stateful_set() -> None:
    """With `engine.enabled: false` the gateway serves the listed replicas, alone."""
    replicas = ["a=http://10.0.0.1:8001", "b=https://engine.example"]
    objects = render(minimal(engine__enabled=False, externalReplicas=replicas))
    assert {item["kind"] for item in objects} == {
        "ConfigMap",
        "Deployment",
        "Service",
        "ServiceAccount",
    }
    listed = env_of(only(objects, "Deployment"))["CARTRIDGE_ROUTER_REPLICAS"]["value"]
    assert listed == ",".join(replicas)


def test_long_release_names_still_give_legal_pod_names() -> None:
    """A release name of 53 characters leaves room for the longest suffix."""
    objects = render(minimal(engine__replicas=1000), release="r" * 53)
    name = only(objects, "StatefulSet")["metadata"]["name"]
    assert len(f"{name}-999") <= 63
    assert len(only(objects, "Service", "-engine-headless")["metadata"]["name"]) <= 63


def test_budgets_are_off_until_they_are_asked_for() -> None:
    """The minimal values make no PodDisruptionBudget, the default ones two."""
    kinds = [item["kind"] for item in render(minimal())]
    assert "PodDisruptionBudget" not in kinds
    objects = render(values_of(CHART / "ci" / "default-values.yaml"))
    assert [item["kind"] for item in objects].count("PodDisruptionBudget") == 2


# --- who may connect -----------------------------------------------------------------------------
def selected(policy: Manifest, workload: Manifest) -> bool:
    """Whether a policy is about the pods of a workload."""
    wanted = policy["spec"]["podSelector"]["matchLabels"]
    return bool(wanted.items() <= workload["spec"]["template"]["metadata"]["labels"].items())


def callers_of(policy: Manifest) -> dict[int | None, list[Manifest] | None]:
    """Port -> peers that may connect to it; `None` for all ports, and for everybody."""
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    found: dict[int | None, list[Manifest] | None] = {}
    for rule in policy["spec"]["ingress"]:
        ports = rule.get("ports", [{"port": None, "protocol": "TCP"}])
        assert [port["protocol"] for port in ports] == ["TCP"]
        found[ports[0]["port"]] = rule.get("from")
    return found


def pods_of(workload: Manifest) -> Manifest:
    """A peer that is the pods of a workload."""
    return {"podSelector": {"matchLabels": workload["spec"]["selector"]["matchLabels"]}}


def network_objects(**changes: Any) -> list[Manifest]:
    """What the values with a network policy render to."""
    values = values_of(CHART / "ci" / "network-policy-values.yaml")
    values["networkPolicy"] |= changes
    return render(values)


def test_network_policies_are_off_until_they_are_asked_for() -> None:
    """An upgrade cuts nobody off whom the chart cannot know; the notes say what is open."""
    assert "NetworkPolicy" not in [item["kind"] for item in render(minimal())]
    assert "networkPolicy.enabled is false" in notes(minimal())
    assert "networkPolicy" not in notes(minimal(networkPolicy__enabled=True))


def test_each_pod_is_reached_by_whom_the_values_name() -> None:
    """Engines by gateways; operators' listener and control port by configured peers only."""
    objects = network_objects()
    gateway, engine = only(objects, "Deployment"), only(objects, "StatefulSet")
    agent = only(objects, "DaemonSet")
    policies = [item for item in objects if item["kind"] == "NetworkPolicy"]
    (of_gateway,), (of_engine,), (of_agent,) = (
        [policy for policy in policies if selected(policy, workload)]
        for workload in (gateway, engine, agent)
    )
    monitoring = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    }
    assert callers_of(of_gateway) == {
        8000: [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}],
        8005: [{"ipBlock": {"cidr": "10.1.0.0/24"}}],
    }
    assert callers_of(of_engine) == {
        8001: [
            pods_of(gateway),
            {**monitoring, "podSelector": {"matchLabels": {"app": "prometheus"}}},
        ],
        8002: [{"podSelector": {"matchLabels": {"app": "prefetcher"}}}],
    }
    assert callers_of(of_agent) == {8004: [monitoring]}
    ports = {port["name"]: port["containerPort"] for port in container_of(engine)["ports"]}
    assert set(callers_of(of_engine)) == set(ports.values())


def test_gateways_that_have_engines_copy_get_their_token_and_reach_them() -> None:
    """With `replication.enabled` only: the token of the engines, and a way to the control port."""
    values = values_of(CHART / "ci" / "network-policy-values.yaml")
    plain = render(values)
    values["router"]["config"]["replication"] = {"enabled": True}
    copies = render(values)
    token = "CARTRIDGE_ROUTER_CONTROL_TOKEN"
    assert token not in env_of(only(plain, "Deployment"))
    assert env_of(only(copies, "Deployment"))[token] == env_of(only(copies, "StatefulSet"))[token]
    gateway, engine = only(copies, "Deployment"), only(copies, "StatefulSet")
    (policy,) = (
        item for item in copies if item["kind"] == "NetworkPolicy" and selected(item, engine)
    )
    assert callers_of(policy)[8002] == [
        pods_of(gateway),
        {"podSelector": {"matchLabels": {"app": "prefetcher"}}},
    ]


def test_a_gateway_of_other_engines_names_no_secret_that_nobody_named() -> None:
    """It may have their token from a file; a Secret that is named it gets."""
    token = "CARTRIDGE_ROUTER_CONTROL_TOKEN"
    changes = {
        "engine__enabled": False,
        "externalReplicas": ["a=http://a:8001"],
        "router__config": {"replication": {"enabled": True}},
    }
    for secret in ("", "theirs"):
        control = {"tokenSecret": {"secretName": secret, "secretKey": "token"}}
        objects = render(minimal(engine__control=control, **changes))
        reference = env_of(only(objects, "Deployment")).get(token)
        wanted = {"secretKeyRef": {"name": secret, "key": "token"}} if secret else None
        assert (reference or {}).get("valueFrom") == wanted


def test_redis_is_reached_by_gateways_and_engines() -> None:
    """And by the others that are named; without its labels the chart cannot know it."""
    objects = network_objects()
    policy = only(objects, "NetworkPolicy", "-redis")
    assert policy["spec"]["podSelector"] == {"matchLabels": {"app": "redis"}}
    assert callers_of(policy) == {
        6379: [pods_of(only(objects, "Deployment")), pods_of(only(objects, "StatefulSet"))],
        None: [{"podSelector": {"matchLabels": {"app": "redis"}}}],
    }
    elsewhere = network_objects(redis={"podLabels": {}})
    names = [item["metadata"]["name"] for item in elsewhere if item["kind"] == "NetworkPolicy"]
    assert len(names) == 3


def test_without_peers_only_the_api_is_open() -> None:
    """Of the gateway to all, of engines to gateways; nobody else reaches anything."""
    objects = render(
        minimal(
            networkPolicy__enabled=True,
            agent__enabled=True,
            router__config={"admin": {"port": 8005}},
        )
    )
    policies = {
        item["metadata"]["labels"]["app.kubernetes.io/component"]: callers_of(item)
        for item in objects
        if item["kind"] == "NetworkPolicy"
    }
    assert policies == {
        "gateway": {8000: None},
        "engine": {8001: [pods_of(only(objects, "Deployment"))]},
        "agent": {},
    }


def test_engines_elsewhere_have_no_policy_here() -> None:
    """Their pods are not the chart's."""
    objects = render(
        minimal(
            networkPolicy__enabled=True,
            engine__enabled=False,
            externalReplicas=["a=http://a:8001"],
        )
    )
    assert [item["kind"] for item in objects].count("NetworkPolicy") == 1


def test_operators_without_a_listener_are_refused() -> None:
    """The policy would open a port that nobody serves."""
    peers = [{"podSelector": {"matchLabels": {"app": "x"}}}]
    with pytest.raises(helm.HelmError, match=r"networkPolicy\.operators.*admin\.port"):
        render(minimal(networkPolicy__enabled=True, networkPolicy__operators=peers))


def test_each_template_file_holds_one_kind() -> None:
    """A file is named for the kind of everything in it, and some example makes something of it."""
    found: dict[str, set[str]] = {}
    with helm.Chart.load(CHART) as chart:
        for case in CI_FILES:
            for path, text in chart.render(values_of(case), name=RELEASE).items():
                if path.endswith(".yaml"):
                    kinds = {item["kind"].lower() for item in yaml.safe_load_all(text) if item}
                    found.setdefault(path, set()).update(kinds)
    assert found == {path: {Path(path).stem} for path in found}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"redis__url": ""}, "/redis/url"),
        ({"redis__url": "http://redis"}, "/redis/url"),
        ({"redis__password": "x"}, "password"),
        ({"redis__passwordsSecret": "A b"}, "/redis/passwordsSecret"),
        ({"router__keysSecret": "A b"}, "/router/keysSecret"),
        ({"store__volume": {}}, "/store/volume"),
        ({"store__url": "s3://bucket/store"}, "/store/volume"),
        ({"store__volume": {}, "store__url": "ftp://host"}, "/store/url"),
        ({"store__volume": {}, "store__url": "oci://maker:secret@host/x"}, "/store/url"),
        ({"engine__nvme__volume": {"nfs": {}}}, "/engine/nvme/volume"),
        ({"engine__nvme__bytes": 0}, "/engine/nvme/bytes"),
        ({"store__volume": {"emptyDir": {}}}, "emptyDir"),
        ({"store__volume__nfs": {"server": "s", "path": "/p"}}, "/store/volume"),
        ({"engine__model": ""}, "/engine/model"),
        ({"engine__replicas": 0}, "/engine/replicas"),
        ({"engine__replicas": "two"}, "/engine/replicas"),
        ({"engine__image__tag": "latest"}, "/engine/image/tag"),
        ({"engine__chatTemplate": "relative.jinja"}, "/engine/chatTemplate"),
        ({"engine__control__port": 8001}, "/engine/control/port"),
        ({"engine__extraEnv": [{"name": "A"}]}, "/engine/extraEnv/0"),
        ({"engine__resources__requsts": {}}, "requsts"),
        ({"router__image__tag": "latest"}, "/router/image/tag"),
        ({"router__image__digest": "sha256:0"}, "/router/image/digest"),
        ({"router__replics": 2}, "replics"),
        ({"router__config": {"placement": {"polcy": "round_robin"}}}, "polcy"),
        ({"router__config": {"port": 70_000}}, "/router/config/port"),
        ({"router__service__type": "ExternalName"}, "/router/service/type"),
        ({"residencyKey__key": "secret"}, "key"),
        ({"engine__enabled": False}, "/externalReplicas"),
        (
            {"engine__enabled": False, "externalReplicas": ["a=http://a"], "agent__enabled": True},
            "/agent/enabled",
        ),
        ({"router__discovery": "dns"}, "/router/discovery"),
        (
            {
                "engine__enabled": False,
                "externalReplicas": ["a=http://a"],
                "router__discovery": "endpointSlices",
            },
            "/router/discovery",
        ),
        ({"agent__socketFolder": "sockets"}, "/agent/socketFolder"),
        ({"agent__dramBytes": "64Gi"}, "/agent/dramBytes"),
        ({"agent__evictionPolicy": "fifo"}, "/agent/evictionPolicy"),
        ({"agent__resources": {}}, "resources"),
        ({"externalReplicas": ["http://no-name"]}, "/externalReplicas/0"),
        ({"networkPolicy__clients": [{}]}, "/networkPolicy/clients/0"),
        ({"networkPolicy__operators": [{"pods": {}}]}, "pods"),
        (
            {"networkPolicy__clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}]},
            "/networkPolicy/clients/0",
        ),
        ({"networkPolicy__clients": [{"ipBlock": {"cidr": "10.0.0.1"}}]}, "/ipBlock/cidr"),
        ({"networkPolicy__redis__podLabels": {"app": 1}}, "/networkPolicy/redis/podLabels/app"),
        ({"surprise": 1}, "surprise"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_values_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    """A wrong or unknown value stops the rendering, and the message names the field."""
    with pytest.raises(helm.HelmValuesError, match=re.escape(field)):
        render(minimal(**changes))


def _closed_objects(schema: Any, path: str = "") -> Iterator[str]:
    """Paths of object schemas with properties that do not refuse others."""
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from _closed_objects(item, f"{path}/{index}")
    if not isinstance(schema, dict):
        return
    is_object = schema.get("type") == "object" and "properties" in schema
    if is_object and schema.get("additionalProperties") is not False:
        yield path
    for key, value in schema.items():
        yield from _closed_objects(value, f"{path}/{key}")


def test_the_schema_is_closed_at_every_level() -> None:
    """Every object schema with properties is closed, and all defaults are described."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert list(_closed_objects(schema)) == []
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(defaults) == set(schema["properties"]) - {"global"}
