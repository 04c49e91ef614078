"""An env from outside: kafka-python, msgpack and HTTP, nothing of streamrl. The policy earns 1 for
an even digit.

python examples/external_env.py BOOTSTRAP RUN ENV GROUPS    # ENV has `replicas: 0` in the run file;
the records: docs/records.md
"""

import array
import json
import math
import os
import sys
import time
import urllib.request

import msgpack
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

# of the run
HEADERS = {
    "Content-Type": "application/json",
    "Authorization": f"Bearer {os.environ.get('STREAMRL_INFERENCE_KEY', 'none')}",
}
CHOICE = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
# all of them: defaults are the model's
SAMPLING = {**CHOICE, "n": 4, "max_tokens": 1, "logprobs": 0, "skip_special_tokens": False}


def latest(bootstrap, topic):
    """The newest record of each key of a compacted topic, by key; null records are gone."""
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    partitions = [TopicPartition(topic, p) for p in consumer.partitions_for_topic(topic)]
    consumer.assign(partitions)
    ends, found = consumer.end_offsets(partitions), {}
    while any(consumer.position(p) < ends[p] for p in partitions):
        found.update(
            {
                m.key.decode(): m.value and msgpack.unpackb(m.value)
                for batch in consumer.poll(200).values()
                for m in batch
            }
        )
    consumer.close()
    return {key: record for key, record in found.items() if record}


def alive(servers, heard):
    """Servers that are ready and have sent a record within 10 s of this clock: that of another
    machine may be wrong. One that was there before is waited for until it sends the next.
    """
    now = time.monotonic()
    for name, server in servers.items():
        beat, since = heard.get(name, (server["heartbeat_s"], -math.inf))
        heard[name] = server["heartbeat_s"], since if server["heartbeat_s"] == beat else now
    return [
        server
        for name, server in servers.items()
        if server.get("state") == "ready" and now - heard[name][1] < 10
    ]


def post(server, path, body):
    data = json.dumps({"model": server.get("model", "policy"), **body}).encode()
    return json.load(
        urllib.request.urlopen(
            urllib.request.Request(server["url"] + path, data, HEADERS), timeout=60
        )
    )


def packed(values, dtype=None):
    """An array as it travels: [dtype, shape], then the raw little-endian data; token ids as narrow
    as they fit.
    """
    dtype = dtype or ("<u2" if max(values) < 1 << 16 else "<u4")
    return msgpack.ExtType(
        1,
        msgpack.packb([dtype, [len(values)]])
        + array.array({"<u2": "H", "<u4": "I", "<f4": "f"}[dtype], values).tobytes(),
    )


def rollout(env, group, index, server, question, ids, choice):
    spans, end = (
        [[int(span["version"]), span["start"], span["end"]] for span in choice["weight_versions"]],
        choice["finish_reason"],
    )
    how = {
        "server": server["server_id"],
        "temperature": 1.0,
        "max_tokens": 1,
        "finish_reason": end,
        "version_spans": spans,
    }
    logprobs = packed([entry["logprob"] for entry in choice["logprobs"]["content"]], "<f4")
    asked = {"message": question, "role": "user", "tokens": packed(ids)}
    said = {
        "message": choice["text"],
        "role": "assistant",
        "tokens": packed(choice["token_ids"]),
        "logprobs": logprobs,
        "inference_metadata": how,
    }
    names = {
        "environment": env,
        "problem_id": group,
        "rollout_uid": f"{group}-{index}",
        "group_id": group,
        "producer": f"{env}-outside",
    }
    seen = {
        "policy_version": min(s[0] for s in spans),
        "newest_policy_version": max(s[0] for s in spans),
        "truncated": end == "length",
    }
    reward = float(choice["text"] in set("02468"))
    return {
        **names,
        **seen,
        "temperature": 1.0,
        "turns": [asked, said],
        "reward": reward,
        "rewards": {"even": reward},
    }


def main(bootstrap, run, env, groups):
    producer = KafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"{run}.{env}-outside")
    producer.init_transactions()
    made = tokens = before = 0
    heard = {}
    while made < int(groups):
        ready = alive(latest(bootstrap, f"{run}.servers"), heard)
        demand = latest(bootstrap, f"{run}.demand").get(env, {})
        # since the run began, earlier lives included
        closed = demand.get("closed_groups", {}).get(f"{env}-outside", 0)
        before = before if made else closed
        # what is on its way is enough
        if not ready or tokens * (made + before - closed) / max(made, 1) >= demand.get(
            "wanted_tokens", 0
        ):
            time.sleep(0.5)
            continue
        group, question = f"{env}-{time.time_ns()}", f"{made % 10}="
        ids = post(
            ready[0],
            "/v1/chat/completions/render",
            {"messages": [{"role": "user", "content": question}], "max_tokens": 1},
        )["token_ids"]
        choices = post(
            ready[0],
            "/inference/v1/generate",
            {"token_ids": ids, "sampling_params": SAMPLING, "output_mode": "text"},
        )["choices"]
        producer.begin_transaction()
        for index, choice in enumerate(choices):
            record = msgpack.packb(rollout(env, group, index, ready[0], question, ids, choice))
            producer.send(
                f"{run}.rollouts.{env}",
                record,
                key=group.encode(),
                headers=[("schema", b"rollout/1")],
            )
        producer.commit_transaction()
        made, tokens = (
            made + 1,
            tokens + sum(len(ids) + len(choice["token_ids"]) for choice in choices),
        )
    print(f"{made} groups of 4 rollouts published to {run}.rollouts.{env}")


if __name__ == "__main__":
    main(*sys.argv[1:])
