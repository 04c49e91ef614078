"""Where secrets may stand, and where they are looked up."""

import pytest

from streamrl.config.run_file import RunFile, load, parse
from streamrl.config.secrets import (
    inheritable_environment,
    is_secret,
    plaintext_secrets,
    references,
    resolve_reference,
    resolve_references,
)
from streamrl.envs.sessions.keys import Key, RunKeys
from streamrl.stream.local_kafka import connect
from streamrl.system.errors import ConfigError

SECRET = "hunter2-and-more"


def test_references_are_found_at_any_depth_with_the_keys_that_lead_there():
    settings = {
        "kafka": {"sasl.password": "env:PASSWORD", "bootstrap.servers": "kafka:9092"},
        "sinks": [{"kind": "mine"}, {"params": {"token": "env:TOKEN"}}],
    }
    assert list(references(settings)) == [
        (("kafka", "sasl.password"), "PASSWORD"),
        (("sinks", "1", "params", "token"), "TOKEN"),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "sasl.password",
        "ssl.key.password",
        "ssl.keystore.password",
        "ssl.key.pem",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.config",
        "sasl.oauthbearer.assertion.private.key.passphrase",
        "api_key",
        "Authorization",
        "cookie",
        "passwd",
        "db_pwd",
        "hf_pat",
        "bearer",
        "auth",
        "basic_auth",
        "dsn",
        "connection_string",
        "signature",
    ],
)
def test_secrets_are_known_by_their_names(name: str):
    assert is_secret(name)
    (problem,) = plaintext_secrets({name: SECRET, "bootstrap.servers": "a:1"}, "kafka")
    assert (
        problem.startswith(f"kafka.{name}: a secret does not belong in a run file; write env:NAME")
        and SECRET not in problem
    )
    assert [
        *plaintext_secrets({name: "env:PASSWORD"}, "kafka"),
        *plaintext_secrets({name: ""}, "kafka"),
    ] == []


@pytest.mark.parametrize(
    "name",
    [
        "sasl.username",
        "ssl.key.location",
        "ssl.ca.location",
        "bootstrap.servers",
        "sasl.mechanism",
        "client.id",
        "author",
        "max_tokens",
        "tokenizer",
        "path",
        "pattern",
    ],
)
def test_what_is_no_secret_may_stand_anywhere(name: str):
    assert not is_secret(name) and not list(plaintext_secrets({name: "x"}, "kafka"))


def test_a_reference_is_looked_up_and_everything_else_is_as_it_stands():
    settings = {
        "sasl.password": "env:PASSWORD",
        "sasl.username": "env:USER",
        "bootstrap.servers": "a:1",
        "socket.timeout.ms": 5,
    }
    there = {"PASSWORD": SECRET, "USER": "r.env-a"}
    assert resolve_references(settings, "kafka", there) == {
        **settings,
        "sasl.password": SECRET,
        "sasl.username": "r.env-a",
    }
    assert resolve_reference("plain", "x", {}) == "plain"


@pytest.mark.parametrize("there", [{}, {"PASSWORD": ""}])
def test_a_variable_that_is_not_set_is_named(there: dict[str, str]):
    with pytest.raises(
        ConfigError,
        match=(
            r"kafka.sasl.password is env:PASSWORD, but the environment variable 'PASSWORD' is not"
            r" set; set it"
        ),
    ):
        resolve_references({"sasl.password": "env:PASSWORD"}, "kafka", there)


def run_file(**settings: object) -> RunFile:
    return parse({"run": "r", "envs": {"a": {}}, **settings})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"kafka": {"sasl.password": SECRET}},
            "kafka.sasl.password: a secret does not belong in a run file",
        ),
        (
            {"inference": {"api_key": SECRET}},
            "inference.api_key: a secret does not belong in a run file",
        ),
        (
            {"inference": {"extra_args": ["--api-key", SECRET]}},
            "--api-key would show in the process list; set inference.api_key",
        ),
        (
            {"inference": {"extra_args": [f"--api-key={SECRET}"]}},
            "--api-key would show in the process list",
        ),
        (
            {"inference": {"extra_args": ["--api_key", SECRET]}},
            "--api_key would show in the process list",
        ),
        (
            {"inference": {"extra_args": ["--hf-token", SECRET]}},
            "--hf-token would show in the process list",
        ),
        (
            {"inference": {"extra_args": ["--download", f"https://u:{SECRET}@host/"]}},
            "inference.extra_args.1: credentials in a URI would show",
        ),
        (
            {"weights": {"store": f"s3://user:{SECRET}@bucket/w"}},
            "weights.store: credentials in a URI would show",
        ),
        (
            {"weights": {"store": f"https://host/b?sv=1&sig={SECRET}"}},
            "weights.store: credentials in a URI would show",
        ),
        (
            {"envs": {"a": {"params": {"deep": [{"api_key": SECRET}]}}}},
            r"envs.a.params.deep.0.api_key: a secret does not belong",
        ),
        (
            {"orchestrator": {"sinks": [{"kind": "wandb", "params": {"api_key": SECRET}}]}},
            r"orchestrator.sinks.0.params.api_key: a secret",
        ),
        (
            {
                "orchestrator": {
                    "sinks": [
                        {"kind": "mlflow", "params": {"tracking_uri": f"https://me:{SECRET}@host"}}
                    ]
                }
            },
            "tracking_uri: credentials in a URI would show",
        ),
    ],
)
def test_a_run_file_with_a_secret_in_it_is_refused_without_repeating_it(
    settings: dict[str, object], says: str
):
    with pytest.raises(ConfigError, match=says) as caught:
        run_file(**settings)
    assert SECRET not in str(caught.value)


def test_on_the_command_line_neither():
    """It would be in the process list."""
    with pytest.raises(
        ConfigError, match="kafka: a secret|kafka.sasl.password: a secret"
    ) as caught:
        load("deploy/runs/quickstart.yaml", [f"kafka={{sasl.password: {SECRET}}}"])
    assert SECRET not in str(caught.value)


def test_the_settings_of_a_cluster_are_revealed_and_the_run_file_keeps_the_references(
    monkeypatch: pytest.MonkeyPatch,
):
    run = run_file(kafka={"bootstrap.servers": "a:1", "sasl.password": "env:KAFKA_PASSWORD"})
    monkeypatch.setenv("KAFKA_PASSWORD", SECRET)
    assert connect.cluster_settings(run)["sasl.password"] == SECRET
    assert "env:KAFKA_PASSWORD" in run.to_json() and SECRET not in run.to_json()
    monkeypatch.setenv("STREAMRL_KAFKA", "{bootstrap.servers: 'b:2', sasl.password: env:OTHER}")
    monkeypatch.setenv("OTHER", "another")
    assert connect.cluster_settings(run) == {"bootstrap.servers": "b:2", "sasl.password": "another"}


@pytest.mark.parametrize(
    "name",
    [
        "plugin.library.paths",
        "ssl.engine.location",
        "ssl.providers",
        "sasl.kerberos.kinit.cmd",
        "internal.termination.signal",
        "nonsense",
    ],
)
def test_no_setting_of_a_cluster_loads_a_library_or_starts_a_program(name: str):
    with pytest.raises(
        ConfigError, match=f"kafka.{name} is not a setting that a run file may have"
    ):
        run_file(kafka={name: "x"})


def test_the_settings_that_a_cluster_needs_are_all_there():
    reach = (
        "bootstrap.servers",
        "security.protocol",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "ssl.ca.location",
        "ssl.ca.pem",
    )
    mutual = (
        "ssl.certificate.location",
        "ssl.key.location",
        "ssl.endpoint.identification.algorithm",
        "sasl.oauthbearer.token.endpoint.url",
    )
    tuning = (
        "client.id",
        "client.rack",
        "client.dns.lookup",
        "socket.timeout.ms",
        "linger.ms",
        "compression.type",
        "fetch.min.bytes",
    )
    for name in (
        *reach,
        *mutual,
        *tuning,
        "enable.ssl.certificate.verification",
        "broker.address.family",
        "request.timeout.ms",
    ):
        assert run_file(kafka={name: "x"}).kafka == {name: "x"}


def test_a_child_gets_what_it_computes_with_and_nobodys_secrets():
    needed = {
        "PATH": "/bin",
        "HOME": "/h",
        "LC_ALL": "C",
        "PYTHONPATH": "/p",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    names = (
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "WANDB_API_KEY",
        "HF_TOKEN",
        "MY_SASL_PASSWORD",
        "STREAMRL_KAFKA",
        "VLLM_API_KEY",
    )
    secrets = dict.fromkeys((*names, "DATABASE_URL"), SECRET)
    assert inheritable_environment({**needed, **secrets}) == needed


@pytest.mark.parametrize(
    "value",
    [
        "sk-" + "a1" * 20,
        RunKeys(b"0" * 32, "r").make(Key("grade", "agent", "s0"), 0.0, 60.0),
        "Bearer " + "a" * 20,
        "Basic dXNlcjpwYXNz",
        "ghp_" + "a1B2" * 9,
        "github_pat_" + "a1B2" * 9,
        "hf_" + "a1B2" * 9,
        "glpat-" + "a1B2" * 5,
        "xoxb-" + "1234567890-abcdef",
        "AKIA" + "ABCD1234EFGH5678",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.abc",
        "-----BEGIN RSA PRIVATE KEY-----",
        "https://hooks.slack.com/services/T0/B0/abc",
        "https://discord.com/api/webhooks/1/abc",
        '{"model": "m", "api_key": "x"}',
        '--config={"deep": [{"password": "x"}]}',
        '[{"headers": {"Authorization": "x"}}]',
    ],
)
def test_secrets_are_known_by_their_look_under_any_name(value: str):
    (problem,) = plaintext_secrets({"params": {"note": [value]}}, "envs.a")
    assert problem.startswith("envs.a.params.note.0") and value not in problem


@pytest.mark.parametrize(
    "value",
    [
        "sk-learn",
        "a bearer of news",
        "hf_transfer",
        "basic",
        "eyJ",
        "0" * 64,
        "https://hub.example/models/a",
        '{"block_size": 32}',
        "[1, 2",
        "{" * 3_000,
        "meta-llama/Llama-3",
    ],
)
def test_what_only_resembles_a_secret_is_taken(value: str):
    assert not list(plaintext_secrets({"params": {"note": value}}))


@pytest.mark.parametrize(
    "settings",
    [
        {"kafka": {"client.id": "env:AWS_SECRET_ACCESS_KEY"}},
        {"kafka": {"bootstrap.servers": "env:HOME"}},
        {"model": {"path": "env:HOME"}},
        {"envs": {"a": {"params": {"note": "env:HOME"}}}},
        {"envs": {"a": {"params": {"note": ["env:HOME"]}}}},
        {"weights": {"store": "env:HOME"}},
        {"orchestrator": {"sinks": [{"kind": "wandb", "params": {"project": "env:HOME"}}]}},
    ],
)
def test_a_variable_is_named_where_a_secret_belongs_and_nowhere_else(settings: dict[str, object]):
    with pytest.raises(ConfigError, match="env:NAME is for secrets"):
        run_file(**settings)


def test_settings_that_hold_secrets_name_their_variables():
    run_file(
        kafka={
            "bootstrap.servers": "a:1",
            "security.protocol": "SASL_SSL",
            "sasl.username": "env:USER",
            "sasl.password": "env:PASSWORD",
            "ssl.ca.location": "env:CA",
        },
        inference={"host": "env:POD_IP", "api_key": "env:KEY"},
        gateway={"signing_secret": "env:SECRET"},
        orchestrator={"sinks": [{"kind": "wandb", "params": {"api_key": "env:KEY"}}]},
    )
