// An env from outside in Go: franz-go, MessagePack and HTTP, nothing of streamrl. The policy earns 1 for an even digit.
//
//	go run . BOOTSTRAP RUN ENV GROUPS    # ENV has `replicas: 0` in the run file; docs/other-languages.md explains each step
//	go run . example                     # the bytes of one rollout in hex
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"math"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/vmihailenco/msgpack/v5"
)

const (
	samples = 4 // answers to a problem: buffer.group_size of the run file
	silence = 10 * time.Second
)

// ---- records ----------------------------------------------------------------------------------------------------------------------

// Array is MessagePack extension type 1: [dtype, [size]], then the raw little-endian data.
type Array struct {
	dtype string
	size  int
	data  []byte
}

func (a Array) EncodeMsgpack(enc *msgpack.Encoder) error {
	head, err := msgpack.Marshal([]interface{}{a.dtype, []int{a.size}})
	if err != nil {
		return err
	}
	if err := enc.EncodeExtHeader(1, len(head)+len(a.data)); err != nil {
		return err
	}
	_, err = enc.Writer().Write(append(head, a.data...))
	return err
}

// Ids packs token ids, as narrow as they fit.
func Ids(ids []uint32) Array {
	wide := false
	for _, id := range ids {
		wide = wide || id > math.MaxUint16
	}
	var data []byte
	for _, id := range ids {
		if wide {
			data = binary.LittleEndian.AppendUint32(data, id)
		} else {
			data = binary.LittleEndian.AppendUint16(data, uint16(id))
		}
	}
	return Array{map[bool]string{false: "<u2", true: "<u4"}[wide], len(ids), data}
}

// Floats packs logprobs.
func Floats(values []float32) Array {
	var data []byte
	for _, value := range values {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(value))
	}
	return Array{"<f4", len(values), data}
}

type Sampling struct {
	Server       string   `msgpack:"server"`
	Temperature  float64  `msgpack:"temperature"`
	MaxTokens    int      `msgpack:"max_tokens"`
	FinishReason string   `msgpack:"finish_reason"`
	VersionSpans [][3]int `msgpack:"version_spans"` // version, start, end
}

type Turn struct {
	Message  string    `msgpack:"message"`
	Role     string    `msgpack:"role"`
	Tokens   Array     `msgpack:"tokens"`
	Logprobs *Array    `msgpack:"logprobs,omitempty"` // only of what the policy sampled
	How      *Sampling `msgpack:"inference_metadata,omitempty"`
}

type Rollout struct {
	Environment   string             `msgpack:"environment"`
	ProblemID     string             `msgpack:"problem_id"`
	RolloutUID    string             `msgpack:"rollout_uid"`
	Turns         []Turn             `msgpack:"turns"`
	GroupID       string             `msgpack:"group_id"`
	Producer      string             `msgpack:"producer"`
	Reward        float64            `msgpack:"reward"`
	Rewards       map[string]float64 `msgpack:"rewards"`
	Temperature   float64            `msgpack:"temperature"`
	PolicyVersion int                `msgpack:"policy_version"`
	NewestVersion int                `msgpack:"newest_policy_version"`
	Truncated     bool               `msgpack:"truncated"`
	Epoch         int                `msgpack:"epoch,omitempty"`
}

type Server struct {
	ServerID   string  `msgpack:"server_id"`
	URL        string  `msgpack:"url"`
	Pool       string  `msgpack:"pool"`
	Model      string  `msgpack:"model"`
	State      string  `msgpack:"state"`
	HeartbeatS float64 `msgpack:"heartbeat_s"`
}

type Demand struct {
	WantedTokens int            `msgpack:"wanted_tokens"`
	ClosedGroups map[string]int `msgpack:"closed_groups"`
	Epoch        int            `msgpack:"epoch"`
}

// ---- what the run says ------------------------------------------------------------------------------------------------------------

// Run keeps the newest record of each key of two compacted topics.
type Run struct {
	sync.Mutex
	servers map[string]Server
	demand  map[string]Demand
}

func follow(bootstrap, run string) *Run {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(bootstrap),
		kgo.ConsumeTopics(run+".servers", run+".demand"),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
	)
	check(err)
	seen := &Run{servers: map[string]Server{}, demand: map[string]Demand{}}
	go func() {
		for {
			client.PollFetches(context.Background()).EachRecord(func(record *kgo.Record) { check(seen.take(record)) })
		}
	}()
	return seen
}

func (r *Run) take(record *kgo.Record) error {
	r.Lock()
	defer r.Unlock()
	key := string(record.Key)
	switch {
	case strings.HasSuffix(record.Topic, ".demand"):
		var demand Demand
		err := msgpack.Unmarshal(record.Value, &demand)
		r.demand[key] = demand
		return err
	case record.Value == nil: // a null record: the server is gone
		delete(r.servers, key)
		return nil
	default:
		server := Server{Pool: "generation", Model: "policy"} // a field at its default is not sent
		err := msgpack.Unmarshal(record.Value, &server)
		r.servers[key] = server
		return err
	}
}

// now returns a server to ask, if there is one, and what is wanted of an env.
func (r *Run) now(env string) (server *Server, demand Demand) {
	r.Lock()
	defer r.Unlock()
	for _, one := range r.servers {
		heard := time.Unix(0, int64(one.HeartbeatS*1e9))
		if one.State == "ready" && one.Pool == "generation" && time.Since(heard) < silence {
			chosen := one
			server = &chosen
		}
	}
	return server, r.demand[env]
}

// ---- sampling ---------------------------------------------------------------------------------------------------------------------

type Prompt struct {
	TokenIDs []uint32 `json:"token_ids"`
}

type Choice struct {
	TokenIDs     []uint32 `json:"token_ids"`
	Text         string   `json:"text"`
	FinishReason string   `json:"finish_reason"`
	Logprobs     struct {
		Content []struct {
			Logprob float32 `json:"logprob"`
		} `json:"content"`
	} `json:"logprobs"`
	WeightVersions []struct {
		Version string `json:"version"`
		Start   int    `json:"start"`
		End     int    `json:"end"`
	} `json:"weight_versions"`
}

type Answer struct {
	Choices []Choice `json:"choices"`
}

var sampling = map[string]interface{}{ // all of them: a default is the model's, and may be another one's
	"n": samples, "max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
	"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logprobs": 0, "skip_special_tokens": false,
}

var client = http.Client{Timeout: time.Minute}

func post(server *Server, path string, body map[string]interface{}, answer interface{}) error {
	body["model"] = server.Model
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	request, err := http.NewRequest("POST", server.URL+path, bytes.NewReader(data))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+os.Getenv("STREAMRL_INFERENCE_KEY"))
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(io.LimitReader(response.Body, 400))
		return fmt.Errorf("%s answers %s: %s", server.ServerID, response.Status, said)
	}
	return json.NewDecoder(response.Body).Decode(answer)
}

// sample asks a question; the answers are whole, or there is an error.
func sample(server *Server, question string) (ids []uint32, choices []Choice, err error) {
	var prompt Prompt
	messages := []map[string]string{{"role": "user", "content": question}}
	err = post(server, "/v1/chat/completions/render", map[string]interface{}{"messages": messages, "max_tokens": 1}, &prompt)
	if err != nil {
		return nil, nil, err
	}
	var answer Answer
	asked := map[string]interface{}{"token_ids": prompt.TokenIDs, "sampling_params": sampling, "output_mode": "text"}
	if err = post(server, "/inference/v1/generate", asked, &answer); err != nil {
		return nil, nil, err
	}
	for _, choice := range answer.Choices {
		whole := choice.FinishReason == "stop" || choice.FinishReason == "length"
		if !whole || len(choice.TokenIDs) == 0 || len(choice.Logprobs.Content) != len(choice.TokenIDs) || len(choice.WeightVersions) == 0 {
			return nil, nil, fmt.Errorf("%s was cut off: %q after %d tokens", server.ServerID, choice.FinishReason, len(choice.TokenIDs))
		}
	}
	return prompt.TokenIDs, answer.Choices, nil
}

// rollout makes a record of one answer.
func rollout(env, producer, group string, index int, server, question string, ids []uint32, choice Choice) (Rollout, error) {
	var spans [][3]int
	oldest, newest := math.MaxInt32, 0
	for _, span := range choice.WeightVersions {
		version, err := strconv.Atoi(span.Version)
		if err != nil {
			return Rollout{}, err
		}
		spans = append(spans, [3]int{version, span.Start, span.End})
		if version < oldest {
			oldest = version
		}
		if version > newest {
			newest = version
		}
	}
	var values []float32
	for _, entry := range choice.Logprobs.Content {
		values = append(values, entry.Logprob)
	}
	logprobs := Floats(values)
	how := &Sampling{server, 1.0, 1, choice.FinishReason, spans}
	reward := 0.0
	if len(choice.Text) == 1 && strings.Contains("02468", choice.Text) {
		reward = 1.0
	}
	return Rollout{
		Environment: env, ProblemID: question, RolloutUID: fmt.Sprintf("%s-%d", group, index), GroupID: group, Producer: producer,
		Turns: []Turn{
			{Message: question, Role: "user", Tokens: Ids(ids)},
			{Message: choice.Text, Role: "assistant", Tokens: Ids(choice.TokenIDs), Logprobs: &logprobs, How: how},
		},
		Reward: reward, Rewards: map[string]float64{"even": reward}, Temperature: 1.0,
		PolicyVersion: oldest, NewestVersion: newest, Truncated: choice.FinishReason == "length",
	}, nil
}

// ---- publishing -------------------------------------------------------------------------------------------------------------------

func publish(writer *kgo.Client, topic string, rollouts []Rollout) error {
	if err := writer.BeginTransaction(); err != nil {
		return err
	}
	for _, one := range rollouts {
		value, err := msgpack.Marshal(one)
		if err != nil {
			return err
		}
		schema := kgo.RecordHeader{Key: "schema", Value: []byte("rollout/1")}
		record := &kgo.Record{Topic: topic, Key: []byte(one.GroupID), Value: value, Headers: []kgo.RecordHeader{schema}}
		if err := writer.ProduceSync(context.Background(), record).FirstErr(); err != nil {
			return err
		}
	}
	return writer.EndTransaction(context.Background(), kgo.TryCommit)
}

func run(bootstrap, name, env string, groups int) {
	producer := env + "-go"
	family, _, _ := strings.Cut(env, "--") // whose topic it is where ENV is FAMILY--NAME
	topic := name + ".rollouts." + family
	writer, err := kgo.NewClient(
		kgo.SeedBrokers(bootstrap),
		kgo.TransactionalID(name+"."+env+"-outside"),
		kgo.TransactionTimeout(10*time.Second),               // what is left open holds up the env's readers for so long
		kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil)), // murmur2 of the key, as Java's
	)
	check(err)
	defer writer.Close()
	seen, made, tokens, begun, epoch := follow(bootstrap, name), 0, 0, 0, 0
	for made < groups {
		server, demand := seen.now(env)
		closed := demand.ClosedGroups[producer]
		if made == 0 || demand.Epoch > epoch { // groups of earlier lives, and those that are gone
			begun, epoch = closed, demand.Epoch
		}
		mean := 0
		if made > 0 {
			mean = tokens / made
		}
		if open := begun - closed; server == nil || open*mean >= demand.WantedTokens {
			time.Sleep(100 * time.Millisecond)
			continue
		}
		question := fmt.Sprintf("%d=", made%10)
		ids, choices, err := sample(server, question)
		if err != nil {
			log.Print(err)
			time.Sleep(time.Second)
			continue
		}
		unique := make([]byte, 8)
		_, err = rand.Read(unique)
		check(err)
		group := env + "-" + hex.EncodeToString(unique) // never again, in any life
		var rollouts []Rollout
		for index, choice := range choices {
			one, err := rollout(env, producer, group, index, server.ServerID, question, ids, choice)
			check(err)
			one.Epoch = epoch
			rollouts = append(rollouts, one)
			tokens += len(ids) + len(choice.TokenIDs)
		}
		check(publish(writer, topic, rollouts))
		made++
		begun++
	}
	fmt.Printf("%d groups of %d rollouts published to %s\n", made, samples, topic)
}

func example() {
	var choice Choice
	check(json.Unmarshal([]byte(`{"token_ids": [12], "text": "8", "finish_reason": "length", "logprobs": {"content": [{"logprob": -0.5}]},
		"weight_versions": [{"version": "3", "start": 0, "end": 1}]}`), &choice)) // what a server answers
	one, err := rollout("outside", "outside-go", "outside-01", 0, "inference-0", "7=", []uint32{1, 11, 15}, choice)
	check(err)
	value, err := msgpack.Marshal(one)
	check(err)
	for ; len(value) > 0; value = value[min(len(value), 48):] {
		fmt.Printf("%x\n", value[:min(len(value), 48)])
	}
}

func min(a, b int) int {
	if a < b {
		return a
	}
	return b
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == "example" {
		example()
		return
	}
	if len(os.Args) != 5 {
		log.Fatal("go run . BOOTSTRAP RUN ENV GROUPS")
	}
	groups, err := strconv.Atoi(os.Args[4])
	check(err)
	run(os.Args[1], os.Args[2], os.Args[3], groups)
}
