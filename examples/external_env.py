"""An env in a separate program. It knows nothing of streamrl: it uses Kafka (kafka-python),
MessagePack and HTTP. The policy is asked a digit, and earns 1 for answering an even one.

    python examples/external_env.py BOOTSTRAP RUN ENV GROUPS

The run file has `ENV: {replicas: 0}` under `envs`, so that the run makes its topics and starts no
process for it. The program publishes GROUPS groups of rollouts and ends.

It does four things, over and over:

1. It reads which inference servers are ready (topic RUN.servers).
2. It reads how much work is wanted (topic RUN.demand), and waits while enough is on its way.
3. It asks a server for answers to one problem.
4. It publishes them as rollouts (topic RUN.rollouts.ENV), all in one transaction.

docs/records.md describes the records, docs/other-languages.md the requests.
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

GROUP_SIZE = 4  # answers to a problem; the run file has it as buffer.group_size
MAX_TOKENS = 1  # of an answer
LOOK_S = 0.5  # between two looks at servers and demand
SILENT_S = 10.0  # A server that has not been heard of for so long is not asked.

HTTP_HEADERS = {
    "Content-Type": "application/json",
    # A run with an `inference.api_key` expects it here.
    "Authorization": "Bearer " + os.environ.get("STREAMRL_INFERENCE_KEY", "none"),
}

# Every parameter is sent, because what is left out has the server's default. The learner has to
# compute the same distribution, so top_p must be 1, top_k must be -1, and nothing is penalised.
SAMPLING = {
    "n": GROUP_SIZE,
    "max_tokens": MAX_TOKENS,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": 0,  # the logprob of the sampled token alone
    "skip_special_tokens": False,
}


def main(bootstrap, run, env, groups):
    producer_name = f"{env}-outside"

    # Initialising the transactions fences an earlier process of the same name.
    producer = KafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"{run}.{producer_name}")
    producer.init_transactions()

    published_groups = 0
    published_tokens = 0
    begun_groups = 0  # in this epoch, over all processes of this producer
    epoch = 0
    heartbeats = {}

    while published_groups < int(groups):
        servers = live_servers(read_table(bootstrap, f"{run}.servers"), heartbeats)
        demand = read_table(bootstrap, f"{run}.demand").get(env, {})

        # The buffer counts the groups that it has closed by producer, since the run began.
        closed = demand.get("closed_groups", {}).get(producer_name, 0)
        if published_groups == 0 or demand.get("epoch", 0) > epoch:
            # Groups of earlier processes, and those that retention has deleted, are over.
            begun_groups = closed
            epoch = demand.get("epoch", 0)
        open_groups = begun_groups - closed
        open_tokens = open_groups * published_tokens / max(published_groups, 1)
        enough_on_its_way = open_tokens >= demand.get("wanted_tokens", 0)

        if not servers or enough_on_its_way:
            time.sleep(LOOK_S)
            continue

        question = f"{published_groups % 10}="
        group_id = f"{env}-{time.time_ns()}"
        server = servers[0]
        prompt_ids, choices = sample(server, question)
        publish(producer, run, env, group_id, server, question, prompt_ids, choices, epoch)

        published_groups += 1
        begun_groups += 1
        for choice in choices:
            published_tokens += len(prompt_ids) + len(choice["token_ids"])

    print(f"{published_groups} groups of {GROUP_SIZE} rollouts of {env} published")


def read_table(bootstrap, topic):
    """Read a compacted topic to its end: the newest record of each key, by key. A record without a
    value means that its key is gone.
    """
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
    )
    partitions = [TopicPartition(topic, p) for p in consumer.partitions_for_topic(topic)]
    consumer.assign(partitions)
    ends = consumer.end_offsets(partitions)

    table = {}
    while any(consumer.position(partition) < ends[partition] for partition in partitions):
        for messages in consumer.poll(timeout_ms=200).values():
            for message in messages:
                key = message.key.decode()
                if message.value:
                    table[key] = msgpack.unpackb(message.value)
                else:
                    table.pop(key, None)
    consumer.close()
    return table


def live_servers(servers, heartbeats):
    """The servers that are ready and that we have heard of within the last SILENT_S seconds.

    The time is that of our own clock, because a server's clock may be wrong. `heartbeats` remembers
    the last heartbeat of each server and when we first saw it. The heartbeat that a server had when
    we began may be old, so it does not count: we wait for the next one.
    """
    now = time.monotonic()
    live = []
    for name, server in servers.items():
        heartbeat = server["heartbeat_s"]
        if name not in heartbeats:
            heartbeats[name] = (heartbeat, -math.inf)
        elif heartbeats[name][0] != heartbeat:
            heartbeats[name] = (heartbeat, now)
        heard_at = heartbeats[name][1]
        if server.get("state") == "ready" and now - heard_at < SILENT_S:
            live.append(server)
    return live


def sample(server, question):
    """Ask a server for GROUP_SIZE answers. Returns the token ids of the prompt, and the answers.

    The server applies its chat template and its tokenizer, so the ids are exactly what the model
    sees.
    """
    rendered = post(
        server,
        "/v1/chat/completions/render",
        {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": MAX_TOKENS,
        },
    )
    prompt_ids = rendered["token_ids"]
    generated = post(
        server,
        "/inference/v1/generate",
        {
            "token_ids": prompt_ids,
            "sampling_params": SAMPLING,
            "output_mode": "text",
        },
    )
    return prompt_ids, generated["choices"]


def post(server, path, body):
    """Send JSON to a server. Returns its answer."""
    body = {"model": server.get("model", "policy"), **body}
    request = urllib.request.Request(
        url=server["url"] + path,
        data=json.dumps(body).encode(),
        headers=HTTP_HEADERS,
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def publish(producer, run, env, group_id, server, question, prompt_ids, choices, epoch):
    """Publish all rollouts of a group, or none of them. The key is the group's id, so that they are
    in the same partition.
    """
    family = env.partition("--")[0]  # whose topic it is where the env is FAMILY--NAME
    producer.begin_transaction()
    for index, choice in enumerate(choices):
        record = rollout(env, group_id, index, server, question, prompt_ids, choice)
        record["epoch"] = epoch
        producer.send(
            topic=f"{run}.rollouts.{family}",
            key=group_id.encode(),
            value=msgpack.packb(record),
            headers=[("schema", b"rollout/1")],
        )
    producer.commit_transaction()


def rollout(env, group_id, index, server, question, prompt_ids, choice):
    """The record of one answer: what the model was asked, its text, and what that earned."""
    # The server reports which policy version sampled which tokens: [version, start, end].
    version_spans = []
    for span in choice["weight_versions"]:
        version_spans.append([int(span["version"]), span["start"], span["end"]])
    versions = [span[0] for span in version_spans]

    logprobs = []
    for token in choice["logprobs"]["content"]:
        logprobs.append(token["logprob"])

    prompt_turn = {
        "role": "user",
        "message": question,
        "tokens": pack_ids(prompt_ids),
    }
    answer_turn = {
        "role": "assistant",
        "message": choice["text"],
        "tokens": pack_ids(choice["token_ids"]),
        "logprobs": pack_array("<f4", logprobs),
        "inference_metadata": {
            "server": server["server_id"],
            "temperature": SAMPLING["temperature"],
            "max_tokens": MAX_TOKENS,
            "finish_reason": choice["finish_reason"],
            "version_spans": version_spans,
        },
    }

    is_even = choice["text"] in ("0", "2", "4", "6", "8")
    reward = 1.0 if is_even else 0.0
    return {
        "environment": env,
        "problem_id": group_id,
        "group_id": group_id,
        "rollout_uid": f"{group_id}-{index}",
        "producer": f"{env}-outside",
        "turns": [prompt_turn, answer_turn],
        "reward": reward,
        "rewards": {"even": reward},
        "temperature": SAMPLING["temperature"],
        "policy_version": min(versions),
        "newest_policy_version": max(versions),
        "truncated": choice["finish_reason"] == "length",
    }


def pack_ids(ids):
    """Token ids as they travel, in 16 bits each if they fit."""
    dtype = "<u2" if max(ids) < 2**16 else "<u4"
    return pack_array(dtype, ids)


def pack_array(dtype, values):
    """An array as it travels: extension type 1 of MessagePack, which holds [dtype, shape] and then
    the raw values, little-endian.
    """
    typecode = {"<u2": "H", "<u4": "I", "<f4": "f"}[dtype]
    raw = array.array(typecode, values)
    if sys.byteorder == "big":
        raw.byteswap()
    header = msgpack.packb([dtype, [len(values)]])
    return msgpack.ExtType(1, header + raw.tobytes())


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit("usage: external_env.py BOOTSTRAP RUN ENV GROUPS")
    main(*sys.argv[1:])
