"""An env from outside: kafka-python, msgpack and HTTP, nothing of streamrl. The policy earns 1 for an even digit.

    python examples/external_env.py BOOTSTRAP RUN ENV GROUPS

Needs an env of that name with `replicas: 0` in the run file. docs/records.md describes the records.
"""

import array
import json
import sys
import time
import urllib.request
import uuid

import msgpack
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

SAMPLES = 4


def latest(bootstrap, topic):
    """The newest record of each key of a compacted topic, by key; null records are gone."""
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed", consumer_timeout_ms=1000, auto_offset_reset="earliest")
    consumer.assign([TopicPartition(topic, p) for p in consumer.partitions_for_topic(topic)])
    found = {m.key.decode(): m.value and msgpack.unpackb(m.value) for m in consumer}
    consumer.close()
    return {key: record for key, record in found.items() if record}


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body | {"model": "policy"}).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))


def sample(url, question):
    """The prompt's token ids, and answers with token ids, logprobs and the version of each token."""
    ids = post(url + "/v1/chat/completions/render", {"messages": [{"role": "user", "content": question}], "max_tokens": 1})["token_ids"]
    sampling = {"n": SAMPLES, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 1, "logprobs": 0, "skip_special_tokens": False}
    return ids, post(url + "/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling, "output_mode": "text"})["choices"]


def packed(code, dtype, values):
    """An array as it travels: [dtype, shape], then the raw little-endian data."""
    return msgpack.ExtType(1, msgpack.packb([dtype, [len(values)]]) + array.array(code, values).tobytes())


def rollout(env, group, index, server, question, ids, choice):
    spans = [[int(span["version"]), span["start"], span["end"]] for span in choice["weight_versions"]]
    how = {"server": server["server_id"], "temperature": 1.0, "max_tokens": 1, "finish_reason": choice["finish_reason"], "version_spans": spans}
    logprobs = packed("f", "<f4", [entry["logprob"] for entry in choice["logprobs"]["content"]])
    asked = {"message": question, "role": "user", "tokens": packed("H", "<u2", ids)}
    said = {"message": choice["text"], "role": "assistant", "tokens": packed("H", "<u2", choice["token_ids"]), "logprobs": logprobs}
    reward = float(choice["text"] in set("02468"))
    names = {"environment": env, "problem_id": group, "rollout_uid": f"{group}-{index}", "group_id": group, "producer": f"{env}-outside"}
    seen = {"policy_version": min(s[0] for s in spans), "newest_policy_version": max(s[0] for s in spans), "temperature": 1.0}
    return {**names, **seen, "turns": [asked, {**said, "inference_metadata": how}], "reward": reward, "rewards": {"even": reward}}


def main(bootstrap, run, env, groups):
    producer = KafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"{run}.{env}-outside")
    producer.init_transactions()
    made = 0
    while made < int(groups):
        server = next((s for s in latest(bootstrap, f"{run}.servers").values() if s.get("state") == "ready"), None)
        if server is None or latest(bootstrap, f"{run}.demand").get(env, {}).get("wanted_tokens", 0) <= 0:  # it has enough for now
            time.sleep(0.5)
            continue
        group, question = f"{env}-{uuid.uuid4().hex}", f"{made % 10}="
        ids, choices = sample(server["url"], question)
        producer.begin_transaction()
        for index, choice in enumerate(choices):
            record = msgpack.packb(rollout(env, group, index, server, question, ids, choice))
            producer.send(f"{run}.rollouts.{env}", record, key=group.encode(), headers=[("schema", b"rollout/1")])
        producer.commit_transaction()
        made += 1
    print(f"{made} groups of {SAMPLES} rollouts published to {run}.rollouts.{env}")


if __name__ == "__main__":
    main(*sys.argv[1:])
