package cluster

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"jbofd/internal/buildtags"
)

var builds struct {
	sync.Mutex
	done map[string]string
}

// tool is a program beside the daemon, by its name; it is built once.
func tool(t testing.TB, name string) string {
	t.Helper()
	builds.Lock()
	defer builds.Unlock()
	if path := builds.done[name]; path != "" {
		return path
	}
	path := filepath.Join(filepath.Dir(program), name)
	if out, err := exec.Command("go", "build", "-o", path, "jbofd/cmd/"+name).CombinedOutput(); err != nil {
		t.Fatalf("building %s: %v\n%s", name, err, out)
	}
	if builds.done == nil {
		builds.done = map[string]string{}
	}
	builds.done[name] = path
	return path
}

// jbofctl runs a command at a node.
func (b *box) jbofctl(args ...string) string {
	b.t.Helper()
	args = append([]string{"--socket", filepath.Join(b.dir, "admin.sock"), "cluster"}, args...)
	ctx, cancel := context.WithTimeout(b.t.Context(), wait)
	defer cancel()
	out, err := exec.CommandContext(ctx, tool(b.t, "jbofctl"), args...).CombinedOutput()
	if err != nil {
		b.t.Fatalf("jbofctl %q: %v\n%s", args, err, out)
	}
	return string(out)
}

// copies checks, once all ranges are full, that each has so many members, of different nodes, which serve.
func (all boxes) copies(want int) {
	all[0].t.Helper()
	all.full()
	chains, err := all[0].admin.Chains(all[0].t.Context(), -1)
	if err != nil || len(chains.Items) == 0 {
		all[0].t.Fatalf("%d ranges: %v", len(chains.Items), err)
	}
	for _, c := range chains.Items {
		nodes := map[string]bool{}
		for _, m := range c.Members {
			nodes[m.Node] = m.State == "serving"
		}
		serving := 0
		for _, s := range nodes {
			if s {
				serving++
			}
		}
		if serving != want || len(c.Members) != want {
			all[0].t.Errorf("range %d has the members %+v, want %d that serve", c.Range, c.Members, want)
		}
	}
}

// TestReplicasOfFiveNodes is four and five copies of each key, of five nodes: the number is changed by an operator,
// under load, up and down; a node is lost, writes go on, and the copies are there again when it is back. With five
// copies each node answers reads of all keys. What clients see is linearizable.
func TestReplicasOfFiveNodes(t *testing.T) {
	if buildtags.Race {
		t.Skip("TestNodesAreKilled has the same goroutines")
	}
	t.Parallel()
	rng := rand.New(rand.NewPCG(newSeed(t), 0))
	all := newBoxes(t, 5, 3)
	l := startLoad(t, all, 6)
	replicas := func(n int) {
		t.Helper()
		begin := time.Now()
		all[rng.IntN(len(all))].jbofctl("replicas", fmt.Sprint(n), "--wait")
		t.Logf("%d copies of each key are there after %v", n, time.Since(begin).Round(time.Millisecond))
		all.copies(n)
		l.allWritten()
	}
	lost := func(n int) {
		t.Helper()
		b := all[rng.IntN(len(all))]
		b.kill()
		t.Logf("%s killed: all keys are written again after %v", b.name, l.allWritten().Round(time.Millisecond))
		b.start()
		all.copies(n)
		l.allWritten()
	}
	for range rounds() {
		replicas(5)
		l.readAll(all)
		lost(5)
		l.readAll(all)
		replicas(2)
		replicas(4)
		lost(4)
		replicas(5)
		l.readAll(all)
		replicas(3)
	}
	l.stop()
}
