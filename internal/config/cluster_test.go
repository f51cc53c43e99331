package config

import (
	"slices"
	"strings"
	"testing"
)

const embedded = "embedded: {members: [{name: jbof0, client_url: 'http://h:1', peer_url: 'http://h:2'}]}"

// clusterOf adds a cluster of one node to a configuration without subsystems.
func clusterOf(text, etcd string) string {
	return text + `
subsystems:
  - nqn: nqn.2026-11.example.jbofd:c
    allow_any_host: true
    namespaces:
      - {nsid: 1, ssd: s, size: 64MiB, type: kv, replicated: true}
      - {nsid: 2, ssd: s, size: 64MiB, type: kv}
cluster:
  name: demo
  subsystem: nqn.2026-11.example.jbofd:c
  etcd: {` + etcd + `}
  nodes: [{name: jbof0, address: "127.0.0.1:4430", target: "tcp://127.0.0.1:4420"}]
`
}

func TestTheEndpointsOfAnEmbeddedEtcdAreThoseOfItsMembers(t *testing.T) {
	c := mustParse(t, clusterOf(minimal, embedded))
	if got := c.Cluster.EtcdEndpoints(); !slices.Equal(got, []string{"http://h:1"}) {
		t.Errorf("endpoints %q", got)
	}
	c = mustParse(t, clusterOf(minimal, "endpoints: ['http://e:1', 'https://e:2']"))
	if got := c.Cluster.EtcdEndpoints(); !slices.Equal(got, []string{"http://e:1", "https://e:2"}) {
		t.Errorf("endpoints %q", got)
	}
	if got := c.Self(); got.Address != "127.0.0.1:4430" {
		t.Errorf("this node is %+v", got)
	}
}

// TestAReloadChangesTheOtherNodes adds, moves and removes nodes other than this one.
func TestAReloadChangesTheOtherNodes(t *testing.T) {
	one := clusterOf(minimal, embedded)
	const other = "{name: n2, address: '10.0.0.2:1', target: 'tcp://10.0.0.2:4420'}"
	two := strings.Replace(one, "nodes: [", "nodes: ["+other+", ", 1)
	moved := strings.Replace(two, "tcp://10.0.0.2:4420", "tcp://10.0.0.2:4421", 1)
	for _, c := range []struct{ from, to, want string }{
		{one, two, "node of the cluster added: n2"},
		{two, moved, "node of the cluster changed: n2"},
		{moved, one, "node of the cluster removed: n2"},
		{two, two, "no change"},
	} {
		changes, err := Diff(mustParse(t, c.from), mustParse(t, c.to))
		if err != nil || changes.String() != c.want {
			t.Errorf("%q, %v, want %q", changes, err, c.want)
		}
	}
}

// TestAReloadLeavesTheClusterAlone: the membership has told others of the partitions when it began.
func TestAReloadLeavesTheClusterAlone(t *testing.T) {
	text := clusterOf(minimal, embedded)
	const first = "{nsid: 1, ssd: s, size: 64MiB, type: kv, replicated: true}"
	for _, c := range []struct{ old, new, want string }{
		{"lease", "lease", ""},
		{"name: demo", "name: demo2", `cluster.name: "demo" became "demo2", which needs a restart`},
		{"tcp://127.0.0.1:4420", "tcp://127.0.0.1:4421",
			`cluster.nodes[0].target: "tcp://127.0.0.1:4420" became "tcp://127.0.0.1:4421", which needs a restart, ` +
				`because it is this node`},
		{"cluster:\n", "# ", "cluster: present became absent, which needs a restart"},
		{first, strings.Replace(first, "64MiB", "128MiB", 1),
			"size: 64MiB became 128MiB, which needs a restart: it is a partition of the cluster"},
		{first, strings.Replace(first, "true", "false", 1), "replicated: true became false, which needs a restart"},
		{first, strings.Replace(first, "nsid: 1", "nsid: 3", 1),
			"nsid 1 is a partition of the cluster: to remove it needs a restart, during which the other nodes serve " +
				"its ranges if there are two replicas or more. With one, drain the node before it"},
		{first, first + "\n      - {nsid: 3, ssd: s, size: 64MiB, type: kv, replicated: true}",
			"replicated: true: a new partition of the cluster needs a restart, during which the other"},
		{"{nsid: 2, ssd: s, size: 64MiB, type: kv}", "{nsid: 4, ssd: s, size: 64MiB, type: kv}", ""},
	} {
		changed := strings.Replace(text, c.old, c.new, 1)
		if c.old == "cluster:\n" {
			changed = strings.ReplaceAll(text[:strings.Index(text, "cluster:\n")], ", replicated: true", "")
		}
		_, err := Diff(mustParse(t, text), mustParse(t, changed))
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%q became %q: %v, want %q", c.old, c.new, err, c.want)
		}
	}
}

// TestAListenerThatTakesAnyAddressTakesThatOfTheTarget, also where addresses are translated.
func TestAListenerThatTakesAnyAddressTakesThatOfTheTarget(t *testing.T) {
	for listener, ok := range map[string]bool{"0.0.0.0:4420": true, "[::]:4420": true, "[::ffff:127.0.0.1]:4420": true,
		"127.0.0.1:4420": true, "127.0.0.2:4420": false, "127.0.0.1:4421": false, "[::1]:4420": false} {
		text := strings.Replace(clusterOf(minimal, embedded), `"127.0.0.1:0"`, `"`+listener+`"`, 1)
		if _, err := Parse("test.yaml", []byte(text)); (err == nil) != ok {
			t.Errorf("%s: %v", listener, err)
		}
	}
}

// TestAServerOfEtcdThatNoNodeRunsIsRemarkedUpon: jbofd etcd may run it on another machine, or its name is wrong.
func TestAServerOfEtcdThatNoNodeRunsIsRemarkedUpon(t *testing.T) {
	c := mustParse(t, clusterOf(minimal, embedded))
	if r := c.Remarks(); len(r) > 0 {
		t.Errorf("%v", r)
	}
	if r := mustParse(t, minimal).Remarks(); len(r) > 0 {
		t.Errorf("without a cluster: %v", r)
	}
	more := strings.Replace(embedded, "]}", ", {name: n2, client_url: 'http://i:1', peer_url: 'http://i:2'}, "+
		"{name: n3, client_url: 'http://j:1', peer_url: 'http://j:2'}]}", 1)
	r := mustParse(t, clusterOf(minimal, more)).Remarks()
	if len(r) != 2 || !strings.Contains(r[0].Error(), `test.yaml:14:`) ||
		!strings.Contains(r[1].Error(), `cluster.etcd.embedded.members[2].name: "n3" is none of cluster.nodes`) {
		t.Errorf("%v", r)
	}
}
