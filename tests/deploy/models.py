"""Strict models of the custom resources that deploy/kubernetes has: those of Strimzi 1.2
(kafka.strimzi.io/v1).

Written from their CRDs: the fields that are used here and their neighbours, by their types. A field
that is not below is refused, and so is one that is misspelt, which an operator would take without a
word. Whoever uses another field adds it, after a look at the CRD.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
Quantity = Annotated[str, Field(pattern=r"^[0-9.]+(m|Ki|Mi|Gi|Ti|k|M|G|T)?$")]
Size = Annotated[str, Field(pattern=r"^[0-9]+[mMgG]?$")]  # of a Java heap
Config = dict[str, str | int | float | bool]  # Kafka's own settings, under Kafka's own names


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: Name
    namespace: Name | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class OfCluster(Metadata):
    """Strimzi looks after what bears this label."""

    @model_validator(mode="after")
    def _has_cluster(self) -> OfCluster:
        if not self.labels.get("strimzi.io/cluster"):
            raise ValueError("label strimzi.io/cluster is missing: no operator would look at it")
        return self


class Resources(Strict):
    requests: dict[Literal["cpu", "memory"], Quantity] = {}
    limits: dict[Literal["cpu", "memory"], Quantity] = {}


# ---- Strimzi -------------------------------------------------------------------------------------


class TopicSpec(Strict):
    topicName: str | None = None
    partitions: int = Field(ge=1)
    replicas: int = Field(ge=1)
    config: Config = {}


class KafkaTopic(Strict):
    apiVersion: Literal["kafka.strimzi.io/v1"]
    kind: Literal["KafkaTopic"]
    metadata: OfCluster
    spec: TopicSpec


class AclResource(Strict):
    type: Literal["topic", "group", "cluster", "transactionalId"]
    name: str
    patternType: Literal["literal", "prefix"] = "literal"


class Acl(Strict):
    type: Literal["allow", "deny"] = "allow"
    resource: AclResource
    host: str = "*"
    operations: list[
        Literal[
            "Read",
            "Write",
            "Create",
            "Delete",
            "Alter",
            "Describe",
            "ClusterAction",
            "AlterConfigs",
            "DescribeConfigs",
            "IdempotentWrite",
            "All",
        ]
    ] = Field(min_length=1)


class UserAuthentication(Strict):
    type: Literal["tls", "tls-external", "scram-sha-512"]


class UserAuthorization(Strict):
    type: Literal["simple"]
    acls: list[Acl]


class Quotas(Strict):
    producerByteRate: int | None = Field(default=None, ge=0)
    consumerByteRate: int | None = Field(default=None, ge=0)
    requestPercentage: int | None = Field(default=None, ge=0)
    controllerMutationRate: float | None = Field(default=None, ge=0)


class UserSpec(Strict):
    authentication: UserAuthentication
    authorization: UserAuthorization
    quotas: Quotas | None = None


class KafkaUser(Strict):
    apiVersion: Literal["kafka.strimzi.io/v1"]
    kind: Literal["KafkaUser"]
    metadata: OfCluster
    spec: UserSpec


class Volume(Strict):
    id: int = Field(ge=0)
    type: Literal["ephemeral", "persistent-claim"]
    size: Quantity | None = None
    kraftMetadata: Literal["shared"] | None = None
    storageClass: str | None = Field(default=None, alias="class")
    deleteClaim: bool | None = None


class Storage(Strict):
    type: Literal["jbod"]
    volumes: list[Volume]


class JvmOptions(Strict):
    Xms: Size | None = Field(default=None, alias="-Xms")
    Xmx: Size | None = Field(default=None, alias="-Xmx")


class MatchLabels(Strict):
    matchLabels: dict[str, str]


class Spread(Strict):
    maxSkew: int = Field(ge=1)
    topologyKey: str
    whenUnsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    labelSelector: MatchLabels


class PodTemplate(Strict):
    topologySpreadConstraints: list[Spread] = []


class PoolTemplate(Strict):
    pod: PodTemplate | None = None


class PoolSpec(Strict):
    replicas: int = Field(ge=0)
    roles: list[Literal["controller", "broker"]] = Field(min_length=1)
    template: PoolTemplate | None = None
    storage: Storage
    resources: Resources | None = None
    jvmOptions: JvmOptions | None = None


class KafkaNodePool(Strict):
    apiVersion: Literal["kafka.strimzi.io/v1"]
    kind: Literal["KafkaNodePool"]
    metadata: OfCluster
    spec: PoolSpec


class Selector(Strict):
    matchLabels: dict[str, str]


class Peer(Strict):
    podSelector: Selector | None = None
    namespaceSelector: Selector | None = None


class ListenerAuthentication(Strict):
    type: Literal["tls", "scram-sha-512"]


class Listener(Strict):
    name: str = Field(pattern=r"^[a-z0-9]{1,11}$")
    port: int = Field(ge=9092)
    type: Literal[
        "internal", "route", "tlsroute", "loadbalancer", "nodeport", "ingress", "cluster-ip"
    ]
    tls: bool
    authentication: ListenerAuthentication | None = None
    networkPolicyPeers: list[Peer] | None = None


class Authorization(Strict):
    type: Literal["simple"]
    superUsers: list[str] = []


class MetricsValues(Strict):
    allowList: list[str] = []


class MetricsConfig(Strict):
    type: Literal["strimziMetricsReporter"]
    values: MetricsValues | None = None


class Rack(Strict):
    topologyKey: str


class Nodes(Strict):
    version: str
    metadataVersion: str
    listeners: list[Listener] = Field(min_length=1)
    authorization: Authorization
    config: Config
    metricsConfig: MetricsConfig | None = None
    rack: Rack | None = None


class Operator(Strict):
    watchedNamespace: str | None = None
    resources: Resources | None = None


class EntityOperator(Strict):
    topicOperator: Operator
    userOperator: Operator


class Exporter(Strict):
    groupRegex: str | None = None
    topicRegex: str | None = None
    resources: Resources | None = None


class KafkaSpec(Strict):
    kafka: Nodes
    entityOperator: EntityOperator
    kafkaExporter: Exporter | None = None


class Kafka(Strict):
    apiVersion: Literal["kafka.strimzi.io/v1"]
    kind: Literal["Kafka"]
    metadata: Metadata
    spec: KafkaSpec


KINDS: dict[str, type[Strict]] = {
    kind.__name__: kind for kind in (Kafka, KafkaNodePool, KafkaTopic, KafkaUser)
}


def check(manifest: dict[str, Any]) -> None:
    """Raises pydantic's ValidationError."""
    KINDS[manifest["kind"]].model_validate(manifest)
